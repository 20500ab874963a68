"""GGUF models cut into several files: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import StoredTensor
from slotline.plugins.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    import torch

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class SplitGGUF:
    """The parts of one model as if they were one file; metadata is in the first.

    Raises:
        CheckpointError: a part is missing, damaged, or of another model.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.where = paths[0].name
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[str, GGUFFile] = {}
        self.metadata: dict[str, Any] = {}
        for number, path in enumerate(paths):
            if not path.is_file():
                raise CheckpointError(
                    f"{path.parent} has no file {path.name}, part {number + 1} of {len(paths)}; fetch it"
                )
            file = GGUFFile(path)
            self._check(file, number, len(paths))
            self.metadata = self.metadata or file.metadata
            self.tensors.update(file.tensors)
            self._files.update(dict.fromkeys(file.tensors, file))
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise CheckpointError(
                f"{self.where}: the parts hold {len(self.tensors)} tensors, the first says {expected}; fetch all again"
            )

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor from the part that has it."""
        return self._files[name].read(name)

    def _check(self, file: GGUFFile, number: int, count: int) -> None:
        said = (file.metadata.get("split.no", number), file.metadata.get("split.count", count))
        if said != (number, count):
            raise CheckpointError(
                f"{file.where} says that it is part {said[0] + 1} of {said[1]}; it is not what its name says, fetch "
                "it again"
            )
        for name in file.tensors:
            if name in self.tensors:
                raise CheckpointError(
                    f"tensor {name} is in {self.tensors[name].file} and in {file.where}; they are parts of different "
                    "models"
                )


def open_gguf(path: Path) -> GGUFFile | SplitGGUF:
    """Open a GGUF file, with its other parts if it is one of several.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    names = parts_of(path.name)
    if len(names) > 1:
        return SplitGGUF([path.with_name(name) for name in names])
    file = GGUFFile(path)
    if file.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path.name} is one of {file.metadata['split.count']} parts, but not named NAME-00001-of-"
            f"{file.metadata['split.count']:05}.gguf; give the parts back their names, or merge them with "
            "llama-gguf-split --merge"
        )
    return file


def parts_of(name: str) -> list[str]:
    """Return the names of all parts, the file's own if it is not one of several."""
    match = _PART.fullmatch(name)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def first_parts(names: Sequence[str]) -> list[str]:
    """Return one name for each model among files."""
    return sorted({parts_of(name)[0] for name in names})
