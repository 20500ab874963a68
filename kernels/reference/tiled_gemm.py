"""Rows times a matrix; of a tile only the number of parts counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slotline.kernels.reference.gemv import gemv


def tiled_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Any,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [M, N] the product of rows; where the tile has parts, [parts, M, N] in float32 that sum up to it."""
    if tile.parts > 1:
        span = -(-x.shape[1] // (tile.step * tile.parts)) * tile.step
        pieces = zip(torch.split(x, span, 1), torch.split(weight, span, 1), strict=True)
        found = [gemv(a, w, out_dtype=torch.float32) for a, w in pieces]
        found += [torch.zeros_like(found[0])] * (tile.parts - len(found))
        return torch.stack([found[0] + (0.0 if bias is None else bias.float()), *found[1:]])
    return gemv(x, weight, bias, activation=activation, out_dtype=out_dtype)
