"""RMS normalisation, with the residual sum in front of it, and one row times a matrix, in one launch:

    s = r + x        y = norm(s) W^T + b        or act(norm(s) G^T) * (norm(s) U^T)

Each program normalises the row anew: a few kilobytes out of the L2 cache while its weights are on their way, where a
kernel of its own would cost more. The sum goes to a row of its own, since other programs still read r. Rounded as
`rms_norm` and `gemv` one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.gate import check_activation
from slotline.kernels.gemv import finish
from slotline.kernels.launch import jit, padded


@jit
def _norm_gemv_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    summed: tl.tensor,
    out: tl.tensor,
    N: int,
    eps: float,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    MASKED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, LANES)
    LIKE: tl.constexpr = x.dtype.element_ty
    inside = k < K
    there = (n < N)[:, None] & inside[None, :] if MASKED else inside[None, :]
    place = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    release(DEPENDENT)
    tile = tl.load(place, mask=there, other=0.0)  # [n, K]: all of the program's weights, before it waits
    upper_tile = tl.load(place + tl.full((), K, tl.int64) * N, mask=there, other=0.0) if GATED else tile
    scales = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(residual + k, mask=inside, other=0.0).to(tl.float32)).to(LIKE)
        if tl.program_id(0) == 0:
            tl.store(summed + k, value, mask=inside)
        value = value.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    normal = ((value * shrink).to(LIKE).to(tl.float32) * scales).to(LIKE).to(tl.float32)
    total = tl.sum(tile.to(tl.float32) * normal[None, :], 1)
    upper = tl.sum(upper_tile.to(tl.float32) * normal[None, :], 1) if GATED else total
    finish(total, upper, bias, out, n, N, LIKE, BIAS, GATED, GELU)


def pays(columns: int) -> bool:
    """Tell whether it beats a norm of its own: measured on one H200 at 1024 columns, where it does, and at 4096."""
    return columns <= 2048


def settings(columns: int) -> dict[str, int]:
    """Return rows a program takes and its warps: measured on one H200."""
    return {"ROWS": 4, "num_warps": 8} if columns <= 2048 else {"ROWS": 2, "num_warps": 4 if columns <= 4096 else 8}


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
    """Return [1, N] the product of the normalised row, and [1, K] the row before it was normalised.

    Args:
        x: [1, K], contiguous.
        gain: [K], the norm's weight.
        weight: [N, K], or with an activation [2 N, K]: gate, then up.
        bias: [N], or [2 N].
        residual: [1, K], added to x; it is not changed.
        activation: "silu" or "gelu".
        out_dtype: x's unless given.
        dependent: launch before the kernel in front is done, see `dependent`; weights must not be written by one.
    """
    gated, columns = activation is not None, x.shape[1]
    if activation is not None:
        check_activation(activation)
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((1, rows), dtype=out_dtype or x.dtype, device=x.device)
    summed = torch.empty_like(x) if residual is not None else x
    shape = settings(columns)
    _norm_gemv_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x, residual if residual is not None else x, gain, weight, bias if bias is not None else weight, summed, out,
        rows, eps, K=columns, LANES=padded(columns), MASKED=rows % shape["ROWS"] != 0, ADD=residual is not None,
        BIAS=bias is not None, GATED=gated, GELU=activation == "gelu", **shape, **launching(dependent, x.device),
    )  # fmt: skip
    return out, summed
