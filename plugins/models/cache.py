"""Where downloaded models are kept: one folder each, written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotline.errors import DownloadError
from slotline.plugins.models.progress import Progress

MANIFEST = "manifest.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this machine's disk.

    Attributes:
        name: the name that opens it.
        path: its folder.
        bytes: its size.
        format: "gguf", "safetensors", or "" where that is not clear.
    """

    name: str
    path: Path
    bytes: int
    format: str


def cache_dir() -> Path:
    """Return $SLOTLINE_CACHE, or slotline's folder in the platform's cache."""
    own = os.environ.get("SLOTLINE_CACHE")
    if own:
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slotline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "slotline" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotline"


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock of one cache entry against other processes and threads, waiting for it.

    Raises:
        DownloadError: the cache folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".{key}.lock").open("a+b")
    except OSError as error:
        raise DownloadError(
            f"cannot write the model cache {folder}: {error.strerror}; set SLOTLINE_CACHE to one that you may write"
        ) from error
    with file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, however that comes about
        yield


@contextmanager
def partial_folder(folder: Path, key: str) -> Iterator[Path]:
    """Yield a new folder beside the entry, removed afterwards; call with the entry's lock held.

    What earlier processes left when they were killed is removed first.
    """
    for left in folder.glob(f"{_PARTIAL}{key}-*"):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{key}-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, entry: Path, manifest: dict[str, Any]) -> None:
    """Move a finished folder to its final name, manifest included, replacing a damaged one."""
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    if entry.exists():
        shutil.rmtree(entry)
    os.replace(partial, entry)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Check that so many bytes fit on a folder's disk.

    Raises:
        DownloadError: they do not, with both numbers.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            f"{what} takes {needed / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are free on the disk of {folder.parent}; "
            "free some, or set SLOTLINE_CACHE to a folder on another disk"
        )


def explained(error: OSError, variable: str) -> str:
    """Return what went wrong on the disk, and what to do about a full one.

    Args:
        variable: the environment variable that moves the cache elsewhere.
    """
    if error.errno in DISK_FULL:
        return f"no space is left on the disk; free some, or set {variable} to a folder on another disk"
    return error.strerror or str(error)


def read_manifest(entry: Path) -> dict[str, Any] | None:
    """Return an entry's manifest, None where there is none that can be read."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def is_intact(entry: Path, manifest: dict[str, Any], progress: Progress) -> bool:
    """Return whether every file of an entry is there with the checksum it had when it came."""
    for name, expected in manifest["files"].items():
        path = entry / name
        if not path.is_file() or file_sha256(path, progress, f"checking {path.name}") != expected:
            return False
    return bool(manifest["files"])


def file_sha256(path: Path, progress: Progress, label: str) -> str:
    """Return a file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress.step(label, path.stat().st_size) as advance:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; links count as what they point to."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def folder_format(folder: Path) -> str:
    """Return "gguf" or "safetensors" by the files below a folder."""
    suffixes = {path.suffix for path in folder.rglob("*")}
    return next((kind for kind in ("gguf", "safetensors") if f".{kind}" in suffixes), "")
