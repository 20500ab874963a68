"""Hugging Face folders: config.json beside safetensors, or beside pickles where those are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slotline.config import EngineConfig
from slotline.errors import CheckpointError
from slotline.plugins.models.architecture import Architecture, find_architecture
from slotline.plugins.models.checkpoint import Checkpoint, TensorStore
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.generation import sampling_defaults
from slotline.plugins.models.opened import OpenedFiles
from slotline.plugins.models.tensor_files import PickleStore, SafetensorsStore, read_json
from slotline.plugins.models.tokenizer_hf import tokenizer_from_folder


class SafetensorsFormat:
    """Opens a folder with .safetensors files, or one such file with its config beside it."""

    def recognises(self, path: Path) -> bool:
        """Return whether the path is, or holds, a .safetensors file or an index of them."""
        if path.is_file():
            return path.suffix == ".safetensors"
        return any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file()

    def checkpoint(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> Checkpoint:
        """Open weights and config alone.

        Raises:
            CheckpointError: something is missing, damaged or unknown.
        """
        return _checkpoint(_folder(path), SafetensorsStore(path), architectures)

    def open(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> OpenedFiles:
        """Open the folder and check its headers.

        Raises:
            CheckpointError: something is missing, damaged or unknown.
            TokenizerError: likewise, of the tokenizer.
        """
        return _opened(_folder(path), self.checkpoint(path, config, architectures))


class PickleFormat:
    """Opens a folder with .bin files, if the user allows it."""

    def recognises(self, path: Path) -> bool:
        """Return whether the path is, or holds, a .bin file."""
        return path.suffix == ".bin" if path.is_file() else any(path.glob("*.bin"))

    def checkpoint(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> Checkpoint:
        """Open weights and config alone.

        Raises:
            CheckpointError: pickles are not allowed, or something is missing, damaged or unknown.
        """
        if not config.trust_pickle:
            raise CheckpointError(
                f"{path} has its weights in pickles (.bin), which are not opened unless trust_pickle is set; take the "
                "safetensors or GGUF version of the model, or convert it"
            )
        return _checkpoint(_folder(path), PickleStore(path), architectures)

    def open(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> OpenedFiles:
        """Open the folder and check its tensors.

        Raises:
            CheckpointError: pickles are not allowed, or something is missing, damaged or unknown.
            TokenizerError: the tokenizer is missing or of an unknown kind.
        """
        return _opened(_folder(path), self.checkpoint(path, config, architectures))


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _checkpoint(folder: Path, store: TensorStore, architectures: Mapping[str, Architecture]) -> Checkpoint:
    fields = _config(folder)
    names = fields.get("architectures", [])
    named = names[0] if isinstance(names, list) and names else None
    arch = find_architecture(architectures, named, kind="hf", where=fields.where, model_type=fields.get("model_type"))
    return Checkpoint(arch.parse_hf(fields), store, arch.hf_tensors)


def _opened(folder: Path, checkpoint: Checkpoint) -> OpenedFiles:
    tokenizer = tokenizer_from_folder(folder)
    generation = Fields(_optional(folder, "generation_config.json"), "generation_config.json")
    return OpenedFiles(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        template=_template(folder),
        eos_ids=_config(folder).ids("eos_token_id") | generation.ids("eos_token_id"),
        generation=sampling_defaults(generation.values, generation.where),
    )


def _config(folder: Path) -> Fields:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no config.json, which says what the weights are; fetch it too")
    return Fields(read_json(file), file.name)


def _optional(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    return read_json(file) if file.is_file() else {}


def _template(folder: Path) -> tuple[str, str] | None:
    """Return the chat template: a file of its own before a value of tokenizer_config.json.

    Of several named ones, "default" is taken.

    Raises:
        CheckpointError: it is there, but not as text.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8"), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = _optional(folder, name).get("chat_template")
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            value = named.get("default")
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{name}: chat_template is {value!r:.80}; allowed: a text, or a list of named texts")
        if value:
            return value, f"chat_template of {name}"
    return None
