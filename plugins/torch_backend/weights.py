"""A checkpoint's tensors, joined and laid out for the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from slotline.errors import CheckpointError
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.torch_backend.linear import Head, Kinds, Linear, linear_kinds
from slotline.plugins.torch_backend.rotation import Rotations, in_pairs

if TYPE_CHECKING:
    from slotline.plugins.models.checkpoint import Checkpoint

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Projections that read the same input are one matrix.

    Attributes:
        kind: index of its kind among the description's ``layer_kinds``.
    """

    kind: int
    attn_norm: Tensor  # [C] float32, as all norms are
    qkv: Linear  # [T, C] to [T, (H + 2 K) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Linear  # [T, H D] to [T, C]
    attn_post_norm: Tensor | None  # [C]
    mlp_norm: Tensor  # [C]
    gate_up: Linear  # [T, C] to [T, 2 I]
    down: Linear  # [T, I] to [T, C]
    mlp_post_norm: Tensor | None  # [C]


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything the decoder computes with.

    Attributes:
        rotations: complex numbers by position and channel pair.
        nbytes: of all of it.
    """

    embed: Tensor  # [V, C]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [C]
    head: Linear  # [T, C] to [T, V] float32
    rotations: Rotations
    activation: Activation
    nbytes: int


def load_weights(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    quantization: str | None = None,
) -> Weights:
    """Read a checkpoint into memory of the device.

    Args:
        quantization: of the matrices; the embedding and the norms stay as they are.

    Raises:
        ConfigError: the quantization cannot be had here.
        CheckpointError: a tensor is damaged, or the model needs an activation that is not known here.
    """
    config = checkpoint.config
    activation = _ACTIVATIONS.get(config.hidden_act)
    if activation is None:
        raise CheckpointError(
            f"hidden_act is {config.hidden_act!r}; backend torch knows {', '.join(sorted(_ACTIVATIONS))}"
        )
    reader = _Reader(checkpoint, device, dtype, linear_kinds(device, dtype, quantization))
    layers = tuple(_layer(reader, i, config) for i in range(config.num_layers))
    embed = reader.tensor("embed")
    head = reader.head(embed if config.tie_embeddings else None)
    return Weights(
        embed=embed,
        layers=layers,
        final_norm=reader.norm("final_norm"),
        head=head,
        rotations=Rotations(config, positions, device),
        activation=activation,
        nbytes=reader.nbytes,
    )


class _Reader:
    """Read tensors one at a time, move them to the device, and count their bytes."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, kinds: Kinds) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._kinds = kinds
        self.nbytes = 0

    def read(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(self._dtype)

    def tensor(self, name: str) -> Tensor:
        moved = self.read(name).to(self._device)
        self.nbytes += moved.nbytes
        return moved

    def norm(self, name: str) -> Tensor:
        """Return a norm's weight in float32, in which norms are computed."""
        moved = self._checkpoint.tensor(name).float().to(self._device)
        self.nbytes += moved.nbytes
        return moved

    def head(self, embed: Tensor | None) -> Linear:
        """Return the head; tied to the embedding, if that is given."""
        weight = self.read("lm_head").to(self._device) if embed is None else embed
        head = Head(weight, self._kinds.head)
        self.nbytes += head.nbytes + (weight.nbytes if head.keeps_weight and embed is None else 0)
        return head

    def linear(self, prefix: str, parts: str, *, biased: bool, pairs: tuple[str, ...] = ()) -> Linear:
        """Join matrices by their outputs; those in ``pairs`` get their rotary channels side by side."""

        def joined(suffix: str) -> Tensor:
            c = self._checkpoint.config
            found = [(part, self.read(f"{prefix}{part}{suffix}")) for part in parts.split()]
            return torch.cat([in_pairs(t, c.head_dim, c.rotary_dim) if part in pairs else t for part, t in found])

        weight = joined("").to(self._device)
        bias = joined("_bias").to(self._device) if biased else None
        linear = self._kinds.layers(weight, bias)
        self.nbytes += linear.nbytes
        return linear


def _layer(reader: _Reader, index: int, config: DecoderConfig) -> Layer:
    prefix = f"layers.{index}."

    def head_norm(name: str) -> Tensor | None:
        return in_pairs(reader.norm(prefix + name), config.head_dim, config.rotary_dim) if config.qk_norm else None

    def post_norm(name: str) -> Tensor | None:
        return reader.norm(prefix + name) if config.post_norms else None

    return Layer(
        kind=config.kind_of(index),
        attn_norm=reader.norm(f"{prefix}attn_norm"),
        qkv=reader.linear(prefix, "q k v", biased=config.attention_bias, pairs=("q", "k")),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=reader.linear(prefix, "o", biased=config.output_bias),
        attn_post_norm=post_norm("attn_post_norm"),
        mlp_norm=reader.norm(f"{prefix}mlp_norm"),
        gate_up=reader.linear(prefix, "gate up", biased=config.mlp_bias),
        down=reader.linear(prefix, "down", biased=config.mlp_bias),
        mlp_post_norm=post_norm("mlp_post_norm"),
    )
