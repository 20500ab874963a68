"""Architectures: how a checkpoint's config and tensor names map to a decoder description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import TensorNames, TensorStore
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of checkpoints: a description and a name map for each kind of file.

    Attributes:
        name: slotline's name for it.
        hf_names: entries of config.json's ``architectures`` that mean this one.
        parse_hf: config.json to a description.
        hf_tensors: names in Hugging Face checkpoints.
        hf_types: values of config.json's ``model_type`` that mean this one, where it has no ``architectures``.
        gguf_names: values of ``general.architecture`` that mean this one.
        parse_gguf: metadata (keys under the architecture's name) and tensors to a description; None = there are no
            GGUF files of the kind.
        gguf_tensors: names in GGUF files.
    """

    name: str
    hf_names: tuple[str, ...]
    parse_hf: Callable[[Fields], DecoderConfig]
    hf_tensors: TensorNames
    hf_types: tuple[str, ...] = ()
    gguf_names: tuple[str, ...] = ()
    parse_gguf: Callable[[Fields, TensorStore], DecoderConfig] | None = None
    gguf_tensors: TensorNames | None = None


def find_architecture(
    registered: Mapping[str, Architecture], name: object, *, kind: str, where: str, model_type: object = None
) -> Architecture:
    """Return the architecture that a file names.

    Args:
        kind: "hf" or "gguf", whose names are compared.
        model_type: config.json's, asked where ``name`` is None.

    Raises:
        CheckpointError: naming the unknown architecture and the known ones.
    """
    known: dict[str, Architecture] = {}
    types: dict[str, Architecture] = {}
    for arch in registered.values():
        known.update(dict.fromkeys(arch.hf_names if kind == "hf" else arch.gguf_names, arch))
        types.update(dict.fromkeys(arch.hf_types, arch))
    if isinstance(name, str) and name in known:
        return known[name]
    if name is None and isinstance(model_type, str) and model_type in types:
        return types[model_type]
    raise CheckpointError(
        f"{where}: architecture {name or model_type!r} is not supported; known: {', '.join(sorted(known)) or 'none'}"
    )
