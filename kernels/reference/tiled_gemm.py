"""Rows times a matrix; the tile changes nothing."""

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
    dependent: bool = False,
) -> Tensor:
    """Return [M, N] the product of rows."""
    return gemv(x, weight, bias, activation=activation, out_dtype=out_dtype)
