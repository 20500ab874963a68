"""Rotary embeddings as unit complex numbers, one for each position and pair of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.rope import Rope, dynamic_inv_freq, rope_inv_freq


class Rotations:
    """The rotations of every kind of layer, as tables on the device.

    Args:
        positions: how many there are.
    """

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._head_dim = config.head_dim
        self._ropes = [kind.rope for kind in config.layer_kinds]
        every = torch.arange(positions, dtype=torch.float32)
        self._tables = [self._turned(torch.outer(every, rope_inv_freq(rope)), rope).to(device) for rope in self._ropes]

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> list[Tensor]:
        """Return [T, 1, D / 2] for each kind of layer.

        Args:
            positions: [T]
            lengths: [T] of the sequence that each token was computed in; needed where `dynamic_from` is not None.
        """
        return [
            self._of(rope, table, positions, lengths).unsqueeze(1)
            for rope, table in zip(self._ropes, self._tables, strict=True)
        ]

    def _of(self, rope: Rope, table: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
        known = table.index_select(0, positions)
        if rope.dynamic_from is None or lengths is None:
            return known
        longer = (lengths > rope.dynamic_from).nonzero().view(-1)
        if len(longer):
            angles = positions[longer].float()[:, None] * dynamic_inv_freq(rope, lengths[longer].float())
            known.index_copy_(0, longer, self._turned(angles, rope))
        return known

    def _turned(self, angles: Tensor, rope: Rope) -> Tensor:
        """Return [T, D / 2] for angles [T, dim / 2]; channels that do not turn are multiplied by 1."""
        turned = torch.polar(torch.full_like(angles, rope.magnitude), angles)
        still = turned.new_ones(len(angles), (self._head_dim - rope.dim) // 2)
        return torch.cat([turned, still], 1) if still.shape[1] else turned


def dynamic_from(config: DecoderConfig) -> int | None:
    """Return the length above which a token's rotation depends on its sequence's length; None = it never does."""
    return min((kind.rope.dynamic_from for kind in config.layer_kinds if kind.rope.dynamic_from), default=None)


def in_pairs(tensor: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows [heads * D, ...] so that the two channels that rotate together lie side by side.

    Checkpoints pair channel i with i + rotary_dim / 2. Side by side they are one complex number, and the
    rotation is one product; attention does not see the order of q's and k's channels.
    """
    dim, rest = rotary_dim or head_dim, tensor.shape[1:]
    heads = tensor.reshape(-1, head_dim, *rest)
    turning = heads[:, :dim].reshape(-1, 2, dim // 2, *rest).transpose(1, 2).reshape(-1, dim, *rest)
    return torch.cat([turning, heads[:, dim:]], 1).reshape(tensor.shape)
