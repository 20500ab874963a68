"""One row times a matrix: what a step of one token is made of, each a single pass over the weights.

    y = x W^T + b                    or, with an activation, for W of gate rows, then up rows:  act(x G^T) * (x U^T)

A program takes a few rows of W, and products are summed in float32. Its first weights are on their way while it waits
for the kernel in front (`dependent`). The gate is rounded as the separate ops round it: both products, then act(gate).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.gate import activated, check_activation
from slotline.kernels.launch import jit, padded


@jit
def _rows(weight: tl.tensor, n: tl.tensor, k: tl.tensor, N: int, K: tl.constexpr, MASKED: tl.constexpr) -> tl.tensor:
    """Return [n, k] of the weights [N, K] in float32."""
    place = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if MASKED:
        return tl.load(place, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    return tl.load(place).to(tl.float32)


@jit
def _vector(x: tl.tensor, k: tl.tensor, K: tl.constexpr, MASKED: tl.constexpr) -> tl.tensor:
    if MASKED:
        return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return tl.load(x + k).to(tl.float32)[None, :]


@jit
def finish(
    total: tl.tensor,
    upper: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    N: int,
    LIKE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    """Store sums [n], or act(sums) * upper sums, with their biases."""
    inside = n < N
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            upper += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        active = activated(total.to(LIKE).to(tl.float32), GELU).to(LIKE).to(tl.float32)
        total = active * upper.to(LIKE).to(tl.float32)
    tl.store(out + n, total, mask=inside)


@jit
def _gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: int,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, STEP)
    upper_rows = weight + tl.full((), K, tl.int64) * N
    release(DEPENDENT)
    tile = _rows(weight, n, k, N, K, MASKED)
    upper_tile = _rows(upper_rows, n, k, N, K, MASKED) if GATED else tile
    wait(DEPENDENT)
    part = _vector(x, k, K, MASKED)
    acc = tile * part
    upper = upper_tile * part
    for at in range(STEP, K, STEP):
        part = _vector(x, at + k, K, MASKED)
        acc += _rows(weight, n, at + k, N, K, MASKED) * part
        if GATED:
            upper += _rows(upper_rows, n, at + k, N, K, MASKED) * part
    LIKE: tl.constexpr = x.dtype.element_ty
    finish(tl.sum(acc, 1), tl.sum(upper, 1), bias, out, n, N, LIKE, BIAS, GATED, GELU)


def settings(rows: int, columns: int) -> dict[str, int]:
    """Return rows and columns a program takes at a time, and its warps, for weights [rows, columns].

    Measured on one H200: everything that takes 4 to 16 kB at a time comes within a few percent.
    """
    step = 2048 if columns % 2048 == 0 else min(1024, padded(columns))
    long = columns >= 4096
    wide = columns == 4096 and rows * columns < 1 << 26
    return {"ROWS": 1 if long and columns <= 8192 else 2, "STEP": step, "num_warps": 8 if wide else 4}


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dependent: bool = False,
) -> Tensor:
    """Return [1, N] the product of one row.

    Args:
        x: [1, K], contiguous.
        weight: [N, K], or with an activation [2 N, K]: gate, then up.
        bias: [N], or [2 N].
        activation: "silu" or "gelu".
        out_dtype: x's unless given.
        dependent: launch before the kernel in front is done, see `dependent`; weights must not be written by one.
    """
    gated = activation is not None
    if activation is not None:
        check_activation(activation)
    columns = x.shape[1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((1, rows), dtype=out_dtype or x.dtype, device=x.device)
    shape = settings(rows, columns)
    masked = rows % shape["ROWS"] != 0 or columns % shape["STEP"] != 0
    _gemv_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x, weight, bias if bias is not None else weight, out, rows, K=columns, MASKED=masked, BIAS=bias is not None,
        GATED=gated, GELU=activation == "gelu", **shape, **launching(dependent, x.device),
    )  # fmt: skip
    return out
