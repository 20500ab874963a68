"""Products of hidden states with weights, one way or the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slotline.kernels.gate import gate
from slotline.kernels.skinny_gemm import skinny_gemm
from slotline.kernels.tiled_gemm import Tile, tiled_gemm
from slotline.plugins.triton_backend.tuning import Other, Use, Way

ADDED = 1024  # rows from which on the library adds a product to a residual faster than the norm behind does


def compute(
    way: Way,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    use: Use,
    activation: str = "silu",
    *,
    zeros: Tensor,
) -> Tensor:
    """Multiply rows [M, K] with weights [N, K] one way; return [M, N] what `Use` says of them.

    Gated ones are half as many. Those for a norm may be [parts, M, N] in float32. ``zeros`` [N]: the bias of a product
    without one, where a way needs one.
    """
    wide = torch.float32 if use is Use.LOGITS else None
    active = activation if use is Use.GATED else None
    if isinstance(way, Tile):
        return tiled_gemm(x, weight, bias, tile=way, activation=active, out_dtype=wide)
    if way is Other.FEW:
        return skinny_gemm(x, weight, bias, activation=active, out_dtype=wide)
    if wide is not None:
        if x.dtype is wide or not x.is_cuda:
            return functional.linear(x, weight).float()
        return torch.mm(x, weight.t(), out_dtype=wide)
    if way is Other.CUBLASLT and bias is None:
        bias = zeros
    product = functional.linear(x, weight, bias)
    return product if active is None else gate(product, active)


def adds(way: Way, count: int) -> bool:
    """Tell whether ``count`` rows of a product without a bias go to the residual by `add`, in front of their norm.

    The library reads the residual while it computes; a norm that does so waits for memory.
    """
    return way is Other.LIBRARY and count >= ADDED


def add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Add the product of rows [M, K] and weights [N, K] to a residual [M, N], in place."""
    residual.addmm_(x, weight.t())
