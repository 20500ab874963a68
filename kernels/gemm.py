"""A matrix product whose rows do not depend on each other's number: one tile shape and one order of sums for any batch.

    y = x W^T + b

Libraries choose a kernel by the number of rows, and with it the order of sums, so that the same row gives other last
digits in other company. Here each output is summed over K in steps of 64, whatever stands beside it. Rows are padded to
tiles of 64. "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import varying

TILE = 64  # rows of x a program
WIDTH = 128  # rows of W a program
STEP = 64  # columns at a time


@varying("rows")
def _gemm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    stride: int,
    rows: int,
    N: int,
    K: int,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    k = tl.arange(0, STEP)
    left = x + m.to(tl.int64)[:, None] * stride + k[None, :]
    right = weight + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    for at in range(0, K, STEP):
        there = (at + k) < K
        a = tl.load(left + at, mask=(m < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(right + at, mask=there[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, acc, mask=(m < rows)[:, None] & (n < N)[None, :])


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return [M, N], each row with the bits that it has alone.

    Args:
        x: [M, K], rows may be strided.
        weight: [N, K], contiguous.
        bias: [N].
        out_dtype: x's unless given.
    """
    (rows, columns), width = x.shape, weight.shape[0]
    out = torch.empty((rows, width), dtype=out_dtype or x.dtype, device=x.device)
    stages = 4 if x.element_size() == 2 else 2
    _gemm_kernel[(triton.cdiv(width, WIDTH), triton.cdiv(rows, TILE))](
        x, weight, bias if bias is not None else weight, out, x.stride(0), rows, width, columns,
        TILE=TILE, WIDTH=WIDTH, STEP=STEP, BIAS=bias is not None, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out
