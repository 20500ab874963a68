"""The best token of each row, the lowest id among equals."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.results import NOT_FINITE, NOTHING_LEFT, OK, Best


def state_of(logits: Tensor) -> Tensor:
    """Return [R] int32 the status of each row."""
    peaks = logits.amax(-1)  # passes NaN on
    state = torch.where(peaks == float("-inf"), NOTHING_LEFT, OK)
    return torch.where(peaks.isnan() | (peaks == float("inf")), NOT_FINITE, state).int()


def argmax(logits: Tensor) -> Best:
    """Return the best token of each row [R, V]."""
    status = state_of(logits)
    best = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # of ones and zeros: the first one
    return Best(torch.where(status == OK, best, 0).int(), status)
