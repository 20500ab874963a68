"""The gated activation of an MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gate(both: Tensor, activation: str = "silu", *, dependent: bool = False) -> Tensor:
    """Return [T, F] act(gate) * up of [T, 2 F]."""
    first, up = both.chunk(2, -1)
    return (F.silu(first) if activation == "silu" else F.gelu(first, approximate="tanh")) * up
