"""Sources turn a model's name into a folder or file on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slotline.config import EngineConfig
from slotline.errors import ModelNotFound
from slotline.plugins.models.cache import CachedModel
from slotline.plugins.models.progress import Progress


@dataclass(frozen=True, slots=True)
class Located:
    """Where a model is.

    Attributes:
        path: a folder, or one file.
        source: where it came from, for people.
    """

    path: Path
    source: str


class ModelSource(Protocol):
    """One place that models come from."""

    def resolve(self, name: str, config: EngineConfig, progress: Progress) -> Located | None:
        """Return where the model is, fetching it if need be; None = the name is not of this source.

        Raises:
            ModelNotFound: the name is of this source, and there is no such model.
            DownloadError: it cannot be fetched or verified.
        """

    def list_cached(self) -> list[CachedModel]:
        """Return the models of this source on this machine's disk."""

    def remove(self, name: str) -> bool:
        """Delete a model from the disk; return whether it was there."""


class PathSource:
    """A folder or file that is already here."""

    def resolve(self, name: str, config: EngineConfig, progress: Progress) -> Located | None:
        """Return the path if it exists; refuse what can only be meant as a path and does not.

        Raises:
            ModelNotFound: nothing is there.
        """
        path = Path(name).expanduser()
        if path.exists():
            return Located(path, str(path))
        if (
            name.startswith((".", "/", "~", "\\"))
            or name.endswith((".gguf", ".safetensors", ".bin"))
            or name.count("/") > 1
        ):
            raise ModelNotFound(
                f"there is no model at {name}; expected a folder with config.json and weights, or a .gguf file"
            )
        return None

    def list_cached(self) -> list[CachedModel]:
        """Return nothing: the user's own files are not the cache's."""
        return []

    def remove(self, name: str) -> bool:
        """Leave the user's own files alone."""
        return False
