"""Rows times a matrix in tiles that the tensor memory accelerator fetches, with the gate of an MLP in the same launch.

    y = x W^T + b                    or, with an activation, for W of gate rows, then up rows:  act(x G^T) * (x U^T)

A program computes one tile of y, or its sum over one of several parts of K, for the next kernel to add up. Programs
side by side take the same rows of W, which come from memory once. Where a tile has fewer rows of x than the matrix
units take at least, the weights are their first operand. The gate is rounded as the separate ops round it. Which tile
is fastest for which shape, and where a library is, has to be measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slotline.kernels.gate import activated, check_activation
from slotline.kernels.launch import varying

LEAST = 64  # rows of the first operand of a warp group's product


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: ``rows`` of x times ``width`` rows of W, ``step`` columns at a time.

    With ``parts`` > 1 it takes one of so many parts of all columns.
    """

    rows: int
    width: int
    step: int
    warps: int
    stages: int
    parts: int = 1

    def __str__(self) -> str:
        parts = f" parts {self.parts}" if self.parts > 1 else ""
        return f"tile {self.rows}x{self.width}x{self.step} warps {self.warps} stages {self.stages}{parts}"

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Read what `str` wrote.

        Raises:
            ValueError: it is something else.
        """
        found = re.fullmatch(r"tile (\d+)x(\d+)x(\d+) warps (\d+) stages (\d+)(?: parts (\d+))?", text)
        if found is None:
            raise ValueError(f"{text!r} is no tile; it should look like {cls(64, 128, 64, 4, 4)}")
        return cls(*(int(group or 1) for group in found.groups()))


@varying("M", "parts")
def _tiled_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    M: int,
    N: int,
    K: int,
    parts: int,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    TURNED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    across = tl.cdiv(M, ROWS)
    along = tl.cdiv(N, WIDTH)
    first = tl.program_id(0) % across * ROWS
    left = tl.program_id(0) // across % along * WIDTH
    part = tl.program_id(0) // (across * along)
    span = tl.cdiv(tl.cdiv(K, STEP), parts) * STEP
    acc = tl.zeros((WIDTH, ROWS) if TURNED else (ROWS, WIDTH), tl.float32)
    upper = acc
    for at in range(part * span, tl.minimum(part * span + span, K), STEP):
        some = x.load([first, at])
        row = weight.load([left, at])
        if TURNED:
            acc = tl.dot(row, some.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(some, row.T, acc, input_precision="ieee")
        if GATED:
            row = weight.load([N + left, at])
            if TURNED:
                upper = tl.dot(row, some.T, upper, input_precision="ieee")
            else:
                upper = tl.dot(some, row.T, upper, input_precision="ieee")
    m, n = first + tl.arange(0, ROWS), left + tl.arange(0, WIDTH)
    if TURNED:
        acc, upper = acc.T, upper.T
    LIKE: tl.constexpr = bias.dtype.element_ty
    if BIAS:
        offset = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        acc += tl.where(part == 0, offset, 0.0)[None, :]
    if GATED:
        if BIAS:
            upper += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        active = activated(acc.to(LIKE).to(tl.float32), GELU).to(LIKE).to(tl.float32)
        acc = active * upper.to(LIKE).to(tl.float32)
    place = out + (part.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(place, acc, mask=(m < M)[:, None] & (n < N)[None, :])


def fits(columns: int, size: int) -> bool:
    """Tell whether rows of so many elements of ``size`` bytes can be fetched: they must begin at multiples of 16."""
    return columns * size % 16 == 0


def tiled_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [M, N] the product of rows; where the tile has parts, [parts, M, N] in float32 that sum up to it.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], or with an activation [2 N, K]: gate, then up; not in parts then.
        bias: [N], or [2 N].
        tile: how to cut it.
        activation: "silu" or "gelu".
        out_dtype: x's unless given.
    """
    count, columns = x.shape
    if not fits(columns, x.element_size()):
        raise ValueError(f"{columns} columns of {x.dtype} are no multiple of 16 bytes")
    gated = activation is not None
    if activation is not None:
        check_activation(activation)
    if gated and tile.parts > 1:
        raise ValueError(f"{tile} with a gate: only what is added up may come in parts")
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    shape, dtype = ((tile.parts,), torch.float32) if tile.parts > 1 else ((), out_dtype or x.dtype)
    out = torch.empty((*shape, count, rows), dtype=dtype, device=x.device)
    _tiled_kernel[(triton.cdiv(count, tile.rows) * triton.cdiv(rows, tile.width) * tile.parts,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
        TensorDescriptor.from_tensor(weight, [tile.width, tile.step]),
        bias if bias is not None else weight, out, count, rows, columns, tile.parts,
        ROWS=tile.rows, WIDTH=tile.width, STEP=tile.step, TURNED=tile.rows < LEAST, BIAS=bias is not None,
        GATED=gated, GELU=activation == "gelu", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
