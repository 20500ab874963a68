"""Root mean square normalisation, with the residual sum in front of it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, dependent: bool = False
) -> Tensor:
    """Return the normalised rows; ``residual`` becomes its sum with ``x``, which is what is normalised then."""
    if x.dim() == 3:
        x = x.sum(0).to(weight.dtype)
    if residual is not None:
        residual.add_(x)
        x = residual
    return normalised(x, weight, eps)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised rows of [..., H]."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normal.to(x.dtype) * weight
