"""Penalties on tokens that a row has seen."""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(
    logits: Tensor, seen: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Apply repetition, then frequency, then presence in place to rows whose slot is not -1."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            x, times = logits[row], seen[slot]
            count = (times >> 1).float()
            changed = torch.where(x > 0, x / repetition[row], x * repetition[row])
            changed -= frequency[row] * count
            changed -= presence[row] * (count > 0)
            logits[row] = torch.where(times != 0, changed, x)
