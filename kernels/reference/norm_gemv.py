"""RMS normalisation and one row times a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.gemv import gemv
from slotline.kernels.reference.rms_norm import rms_norm


def norm_gemv(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return [1, N] the product of the normalised row, and [1, K] the row before it was normalised."""
    summed = x if residual is None else x + residual
    normal = rms_norm(summed, gain, eps)
    return gemv(normal, weight, bias, activation=activation, out_dtype=out_dtype), summed
