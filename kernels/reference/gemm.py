"""A matrix product, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return [M, N] for x [M, K], weight [N, K] and bias [N]."""
    out = torch.stack([weight.float() @ row.float() for row in x])
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype or x.dtype)
