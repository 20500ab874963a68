"""The GGUF format: one file with weights, config, tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slotline.config import EngineConfig
from slotline.errors import CheckpointError
from slotline.plugins.models.architecture import Architecture, find_architecture
from slotline.plugins.models.checkpoint import Checkpoint
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.generation import sampling_defaults
from slotline.plugins.models.gguf_file import GGUFFile
from slotline.plugins.models.gguf_split import SplitGGUF, first_parts, open_gguf
from slotline.plugins.models.opened import OpenedFiles
from slotline.plugins.models.tokenizer_gguf import tokenizer_from_gguf

# general.sampling.* is how newer converters keep generation_config.json
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GGUFFormat:
    """Opens a .gguf file, or a folder that holds exactly one model."""

    def recognises(self, path: Path) -> bool:
        """Return whether the path is a .gguf file or a folder with one."""
        return path.suffix == ".gguf" if path.is_file() else any(path.glob("*.gguf"))

    def checkpoint(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> Checkpoint:
        """Open config and weights alone.

        Raises:
            CheckpointError: the file is damaged, not of a known architecture, or there are several.
        """
        return _checkpoint(open_gguf(_only_file(path)), architectures)

    def open(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> OpenedFiles:
        """Open the file and check its header.

        Raises:
            CheckpointError: the file is damaged, not of a known architecture, or there are several.
            TokenizerError: its tokenizer is missing or unknown.
        """
        file = open_gguf(_only_file(path))
        return OpenedFiles(
            checkpoint=_checkpoint(file, architectures),
            tokenizer=tokenizer_from_gguf(file.metadata, file.where),
            template=_template(file),
            generation=_generation(file.metadata, file.where),
        )


def _checkpoint(file: GGUFFile | SplitGGUF, architectures: Mapping[str, Architecture]) -> Checkpoint:
    name = file.metadata.get("general.architecture")
    arch = find_architecture(architectures, name, kind="gguf", where=file.where)
    assert arch.parse_gguf is not None and arch.gguf_tensors is not None  # it has a GGUF name
    return Checkpoint(arch.parse_gguf(Fields(file.metadata, file.where, f"{name}."), file), file, arch.gguf_tensors)


def _only_file(path: Path) -> Path:
    if path.is_file():
        return path
    names = first_parts([file.name for file in path.glob("*.gguf")])
    if len(names) > 1:
        raise CheckpointError(f"{path} holds several models; give the path of one: {', '.join(names)}")
    return path / names[0]


def _template(file: GGUFFile | SplitGGUF) -> tuple[str, str] | None:
    text = file.metadata.get("tokenizer.chat_template")
    return (text, f"tokenizer.chat_template of {file.where}") if isinstance(text, str) and text else None


def _generation(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return sampling_defaults(given, where)
