"""A few rows times a matrix: the weights are the wide operand of the matrix units, the rows the narrow one.

    y = x W^T + b                    or, with an activation, for W of gate rows, then up rows:  act(x G^T) * (x U^T)

A program takes some rows of W and all of x, and walks along K with several steps of weights on their way. Where there
are too few rows of W to fill the device, it walks along several parts of K side by side and adds them up at the end, in
a fixed order. The gate is rounded as the separate ops round it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.gate import activated, check_activation
from slotline.kernels.launch import varying

MOST = 16  # rows of x


@varying("M")
def _skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: int,
    N: int,
    K: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m, k = tl.arange(0, LANES), tl.arange(0, STEP)
    held, there = n < N, m < M
    first = weight + n.to(tl.int64) * K
    if PARTS > 1:  # [parts, n, k] and [parts, k, m]
        part = tl.arange(0, PARTS) * (K // PARTS)
        rows = first[None, :, None] + part[:, None, None] + k[None, None, :]
        columns = x + part[:, None, None] + k[None, :, None] + m[None, None, :] * K
        held, there = held[None, :, None], there[None, None, :]
        acc = tl.zeros((PARTS, ROWS, LANES), tl.float32)
    else:
        rows, columns = first[:, None] + k[None, :], x + k[:, None] + m[None, :] * K
        held, there = held[:, None], there[None, :]
        acc = tl.zeros((ROWS, LANES), tl.float32)
    upper = acc
    above = tl.full((), K, tl.int64) * N
    release(DEPENDENT)
    wait(DEPENDENT)
    for at in range(0, K // PARTS, STEP):
        if MASKED:  # not along parts
            more = at + k < K
            some = tl.load(columns + at, mask=there & more[:, None], other=0.0)
            seen = held & more[None, :]
        else:
            some = tl.load(columns + at, mask=there, other=0.0)
            seen = held
        acc = tl.dot(tl.load(rows + at, mask=seen, other=0.0), some, acc, input_precision="ieee")
        if GATED:
            upper = tl.dot(tl.load(rows + above + at, mask=seen, other=0.0), some, upper, input_precision="ieee")
    if PARTS > 1:
        acc, upper = tl.sum(acc, 0), tl.sum(upper, 0)
    LIKE: tl.constexpr = x.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            upper += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        active = activated(acc.to(LIKE).to(tl.float32), GELU).to(LIKE).to(tl.float32)
        acc = active * upper.to(LIKE).to(tl.float32)
    tl.store(out + m[None, :] * N + n[:, None], acc, mask=(n < N)[:, None] & (m < M)[None, :])


def settings(rows: int, columns: int, size: int) -> dict[str, int]:
    """Return the tile a program takes at a time, parts of K, warps and stages, for weights [rows, columns].

    Measured on one H200; 4 bytes an element are multiplied without matrix units and take twice the room.
    """
    if size > 2:
        return {"ROWS": 16, "STEP": 64, "PARTS": 1, "num_warps": 4, "num_stages": 2}
    if rows > 4096 or columns % 512 != 0:
        return {"ROWS": 64, "STEP": 128, "PARTS": 1, "num_warps": 4, "num_stages": 5}
    parts = 2 if rows == 4096 and columns <= 4096 else 4
    return {"ROWS": 16, "STEP": 128, "PARTS": parts, "num_warps": parts, "num_stages": 3 if columns > 8192 else 4}


def pays(count: int, rows: int, columns: int, *, gated: bool = False, size: int = 2) -> bool:
    """Tell whether it beat a library's product of ``count`` rows with weights [rows, columns] on one H200.

    ``rows`` are those of the result: half of the weights' where they are gated. What was not measured gets a no.
    """
    if not 2 <= count <= MOST or size > 2 or columns % 128 != 0 or not 1024 <= columns <= 16384 or rows < 1024:
        return False
    if gated:  # against a product and the gate's own launch
        return rows >= 8192
    return columns <= 2048 or not 16384 <= rows < 65536


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    dependent: bool = False,
) -> Tensor:
    """Return [M, N] the product of up to 16 rows.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], or with an activation [2 N, K]: gate, then up.
        bias: [N], or [2 N].
        activation: "silu" or "gelu".
        out_dtype: x's unless given.
        dependent: launch before the kernel in front is done, see `dependent`; it has not paid so far.
    """
    count, columns = x.shape
    if count > MOST:
        raise ValueError(f"{count} rows are more than {MOST}")
    gated = activation is not None
    if activation is not None:
        check_activation(activation)
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((count, rows), dtype=out_dtype or x.dtype, device=x.device)
    shape = settings(rows, columns, weight.element_size())
    lanes = 8 if shape["PARTS"] > 1 and count <= 8 else 16  # 16 is what a product of whole warp groups takes at least
    _skinny_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x, weight, bias if bias is not None else weight, out, count, rows, K=columns, LANES=lanes,
        MASKED=columns % shape["STEP"] != 0, BIAS=bias is not None, GATED=gated, GELU=activation == "gelu", **shape,
        **launching(dependent, x.device),
    )  # fmt: skip
    return out
