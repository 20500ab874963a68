"""Add listed biases."""

from __future__ import annotations

from torch import Tensor

from slotline.kernels.reference.ban_ids import listed


def add_bias(logits: Tensor, indptr: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add each row's biases in place."""
    for row, line in enumerate(logits):
        inside = listed(indptr, ids, row, len(line))
        line[ids[inside].long()] += values[inside]
