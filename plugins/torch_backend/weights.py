"""A checkpoint's tensors, joined and laid out for the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from slotline.errors import CheckpointError
from slotline.plugins.models.decoder import DecoderConfig, rope_inv_freq
from slotline.plugins.torch_backend.linear import Linear, linear_kind

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
    """One layer. Projections that read the same input are one matrix."""

    attn_norm: Tensor  # [C]
    qkv: Linear  # [T, C] to [T, (H + 2 K) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Linear  # [T, H D] to [T, C]
    mlp_norm: Tensor  # [C]
    gate_up: Linear  # [T, C] to [T, 2 I]
    down: Linear  # [T, I] to [T, C]


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything the decoder computes with.

    Attributes:
        rotation: a unit complex number per position and channel pair.
        nbytes: of all of it.
    """

    embed: Tensor  # [V, C]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [C]
    head: Linear  # [T, C] to [T, V]
    rotation: Tensor  # [positions, D / 2] complex64
    activation: Activation
    nbytes: int


def load_weights(checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, positions: int) -> Weights:
    """Read a checkpoint into memory of the device.

    Raises:
        CheckpointError: a tensor is damaged, or the model needs an activation that is not known here.
    """
    config = checkpoint.config
    activation = _ACTIVATIONS.get(config.hidden_act)
    if activation is None:
        raise CheckpointError(
            f"hidden_act is {config.hidden_act!r}; backend torch knows {', '.join(sorted(_ACTIVATIONS))}"
        )
    reader = _Reader(checkpoint, device, dtype)
    layers = tuple(_layer(reader, f"layers.{i}.", config) for i in range(config.num_layers))
    embed = reader.tensor("embed")
    tied = reader.keeps_embedding_as_head
    head = reader.linear_of(embed if config.tie_embeddings else reader.read("lm_head"), None, counted=not tied)
    return Weights(
        embed=embed,
        layers=layers,
        final_norm=reader.tensor("final_norm"),
        head=head,
        rotation=_rotation(config, positions).to(device),
        activation=activation,
        nbytes=reader.nbytes,
    )


class _Reader:
    """Read tensors one at a time, move them to the device, and count their bytes."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._kind = linear_kind(device, dtype)
        self.nbytes = 0

    @property
    def keeps_embedding_as_head(self) -> bool:
        """Tell whether a tied head is the embedding itself, and not a packed copy of it."""
        return self._checkpoint.config.tie_embeddings and self._kind.__name__ == "PlainLinear"

    def read(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(self._dtype)

    def tensor(self, name: str) -> Tensor:
        moved = self.read(name).to(self._device)
        self.nbytes += moved.nbytes
        return moved

    def linear_of(self, weight: Tensor, bias: Tensor | None, *, counted: bool = True) -> Linear:
        weight = weight.to(self._device)
        self.nbytes += weight.nbytes * counted + (0 if bias is None else bias.nbytes)
        return self._kind(weight, None if bias is None else bias.to(self._device))

    def linear(self, prefix: str, parts: str, *, biased: bool, pairs: tuple[str, ...] = ()) -> Linear:
        """Join matrices by their outputs; those in ``pairs`` get their rotary channels side by side."""

        def joined(suffix: str) -> Tensor:
            head_dim = self._checkpoint.config.head_dim
            found = [(part, self.read(f"{prefix}{part}{suffix}")) for part in parts.split()]
            return torch.cat([in_pairs(t, head_dim) if part in pairs else t for part, t in found])

        return self.linear_of(joined(""), joined("_bias") if biased else None)


def _layer(reader: _Reader, prefix: str, config: DecoderConfig) -> Layer:
    def head_norm(name: str) -> Tensor | None:
        return in_pairs(reader.tensor(prefix + name), config.head_dim) if config.qk_norm else None

    return Layer(
        attn_norm=reader.tensor(f"{prefix}attn_norm"),
        qkv=reader.linear(prefix, "q k v", biased=config.attention_bias, pairs=("q", "k")),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=reader.linear(prefix, "o", biased=config.attention_bias),
        mlp_norm=reader.tensor(f"{prefix}mlp_norm"),
        gate_up=reader.linear(prefix, "gate up", biased=config.mlp_bias),
        down=reader.linear(prefix, "down", biased=config.mlp_bias),
    )


def in_pairs(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder rows [heads * D, ...] so that the two channels that rotate together lie side by side.

    Checkpoints pair channel i with i + D / 2. Side by side they are one complex number, and the
    rotation is one product; attention does not see the order of q's and k's channels.
    """
    rest = tensor.shape[1:]
    return tensor.reshape(-1, 2, head_dim // 2, *rest).transpose(1, 2).reshape(tensor.shape)


def _rotation(config: DecoderConfig, positions: int) -> Tensor:
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_inv_freq(config))
    return torch.polar(torch.ones_like(angles), angles)  # [positions, D / 2]
