"""What a model is and what memory it takes, from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slotline.plugins.models.checkpoint import Checkpoint
from slotline.plugins.models.decoder import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where a model would be loaded.

    Attributes:
        device: its name.
        dtype: of weights, activations and KV cache.
        itemsize: bytes of one value of that type.
        free: bytes of memory that are free there.
    """

    device: str
    dtype: str
    itemsize: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What so many sequences of such a length take.

    Attributes:
        nbytes: weights and KV cache.
        fits: it is not more than what is free.
    """

    slots: int
    length: int
    kv_bytes: int
    nbytes: int
    fits: bool


def weight_bytes(checkpoint: Checkpoint, room: Room) -> int:
    """Return what the weights take once loaded.

    On a CPU the output layer is kept a second time, as float32 in the layout that is fastest there.
    """
    config = checkpoint.config
    head = config.vocab_size * config.hidden_size * 4 if room.device == "cpu" else 0
    return checkpoint.num_parameters * room.itemsize + head


def kv_bytes_per_token(config: DecoderConfig, room: Room) -> int:
    """Return what one token takes in the KV cache, over all layers; a window does not make it less."""
    return config.kv_values_per_token * room.itemsize


def needs(checkpoint: Checkpoint, room: Room, slots: list[int], lengths: list[int]) -> Iterator[Need]:
    """Yield the memory of every number of slots at every length."""
    weights, per_token = weight_bytes(checkpoint, room), kv_bytes_per_token(checkpoint.config, room)
    for length in lengths:
        for count in slots:
            cache = count * length * per_token
            yield Need(
                slots=count, length=length, kv_bytes=cache, nbytes=weights + cache, fits=weights + cache <= room.free
            )


def described(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return what the model is, as labels and values for people."""
    c = checkpoint.config
    heads = f"{c.num_heads}, of {c.head_dim}"
    if c.num_kv_heads != c.num_heads:
        heads += f"; {c.num_kv_heads} for keys and values"
    stored = ", ".join(f"{size(count)} {kind}" for kind, count in checkpoint.stored_types.items())
    return [
        ("architecture", c.architecture),
        ("parameters", f"{checkpoint.num_parameters:,}"),
        ("layers", f"{c.num_layers}{_windows(c)}"),
        ("width", f"{c.hidden_size:,}, {c.intermediate_size:,} in feed-forward layers"),
        ("heads", heads),
        ("vocabulary", f"{c.vocab_size:,}" + (", embeddings tied to the head" if c.tie_embeddings else "")),
        ("context", f"{c.context_length:,} tokens{_scaling(c)}"),
        ("in files", f"{size(checkpoint.weight_bytes)}: {stored}"),
    ]


def size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count} bytes"


def _windows(config: DecoderConfig) -> str:
    if config.sliding_window is None:
        return ""
    windowed = sum(config.kind_of(i) == 0 for i in range(config.num_layers))
    return f", {windowed} of them with a window of {config.sliding_window:,} tokens"


def _scaling(config: DecoderConfig) -> str:
    scaling = config.rope_scaling
    return "" if scaling is None else f", with {scaling.kind} rope scaling"
