"""One row times a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.gate import gate


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dependent: bool = False,
) -> Tensor:
    """Return [1, N] the product of one row."""
    product = x.float() @ weight.float().t()
    if bias is not None:
        product = product + bias.float()
    if activation is not None:
        product = gate(product.to(x.dtype), activation)
    return product.to(out_dtype or x.dtype)
