"""Rows times a matrix in tiles that the tensor memory accelerator fetches, with the gate of an MLP in the same launch.

    y = x W^T + b                    or, with an activation, for W of gate rows, then up rows:  act(x G^T) * (x U^T)

A program computes one tile of y, or its sum over one of several parts of K, for the next kernel to add up. Programs
side by side take the same rows of W, which come from memory once. Where a tile has fewer rows of x than the matrix
units take at least, the weights are their first operand. The gate is rounded as the separate ops round it. Which tile
is fastest for which shape, and where a library is, has to be measured.

Where tiles fill the device one and a half times, a third of it waits. Shared tiles are for that: programs stay, take
whole rounds of tiles, and then an equal share each of the columns of what is left; the last to finish one adds its
shares up, in their order. "Stream-K", Osama et al., 2023.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slotline.kernels.gate import activated, check_activation
from slotline.kernels.launch import jit, varying

LEAST = 64  # rows of the first operand of a warp group's product


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: ``rows`` of x times ``width`` rows of W, ``step`` columns at a time.

    With ``parts`` > 1 it takes one of so many parts of all columns. ``shared``: there is a program for each
    multiprocessor; after whole rounds of tiles they share the columns of those that are left.
    """

    rows: int
    width: int
    step: int
    warps: int
    stages: int
    parts: int = 1
    shared: bool = False

    def __str__(self) -> str:
        more = (f" parts {self.parts}" if self.parts > 1 else "") + (" shared" if self.shared else "")
        return f"tile {self.rows}x{self.width}x{self.step} warps {self.warps} stages {self.stages}{more}"

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Read what `str` wrote.

        Raises:
            ValueError: it is something else.
        """
        form = r"tile (\d+)x(\d+)x(\d+) warps (\d+) stages (\d+)(?: parts (\d+))?( shared)?"
        found = re.fullmatch(form, text)
        if found is None:
            raise ValueError(f"{text!r} is no tile; it should look like {cls(64, 128, 64, 4, 4)}")
        rows, width, step, warps, stages, parts = (int(number or 1) for number in found.groups()[:-1])
        return cls(rows, width, step, warps, stages, parts, shared=found[7] is not None)


@jit
def _summed(
    x: tl.tensor,
    weight: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    N: int,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    TURNED: tl.constexpr,
    GATED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return [ROWS, WIDTH] sums over columns low .. high of rows of x from ``first`` and W from ``left``; and of up."""
    acc = tl.zeros((WIDTH, ROWS) if TURNED else (ROWS, WIDTH), tl.float32)
    upper = acc
    for at in range(low, high, STEP):
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
    if TURNED:
        acc, upper = acc.T, upper.T
    return acc, upper


@jit
def _store(
    acc: tl.tensor,
    upper: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    part: tl.tensor,
    M: int,
    N: int,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    m, n = first + tl.arange(0, ROWS), left + tl.arange(0, WIDTH)
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
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    TURNED: tl.constexpr,
) -> None:
    across, along = tl.cdiv(M, ROWS), tl.cdiv(N, WIDTH)
    first = tl.program_id(0) % across * ROWS
    left = tl.program_id(0) // across % along * WIDTH
    part = tl.program_id(0) // (across * along)
    span = tl.cdiv(tl.cdiv(K, STEP), parts) * STEP
    acc, upper = _summed(
        x, weight, first, left, part * span, tl.minimum(part * span + span, K), N, ROWS, WIDTH, STEP, TURNED, GATED
    )
    _store(acc, upper, bias, out, first, left, part, M, N, ROWS, WIDTH, BIAS, GATED, GELU)


@varying("M", "segments")
def _shared_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    M: int,
    N: int,
    K: int,
    segments: int,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    across = tl.cdiv(M, ROWS)
    tiles, steps = across * tl.cdiv(N, WIDTH), tl.cdiv(K, STEP)
    whole = tiles // programs * programs
    zero = program * 0
    for tile in range(program, whole, programs):
        first, left = tile % across * ROWS, tile // across * WIDTH
        acc, upper = _summed(x, weight, first, left, zero, zero + K, N, ROWS, WIDTH, STEP, False, GATED)
        _store(acc, upper, bias, out, first, left, zero, M, N, ROWS, WIDTH, BIAS, GATED, GELU)
    each = tl.cdiv((tiles - whole) * steps, programs)  # steps of the tiles that are left, for each program
    at = program * each
    end = tl.minimum(at + each, (tiles - whole) * steps)
    inside = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    while at < end:
        tile = at // steps
        low = at - tile * steps
        high = tl.minimum(steps, low + end - at)
        first, left = (whole + tile) % across * ROWS, (whole + tile) // across * WIDTH
        acc, upper = _summed(
            x, weight, first, left, low * STEP, tl.minimum(high * STEP, K), N, ROWS, WIDTH, STEP, False, GATED
        )
        begin, last = tile * steps // each, (tile * steps + steps - 1) // each  # the programs that have a share of it
        if begin == last:
            _store(acc, upper, bias, out, first, left, zero, M, N, ROWS, WIDTH, BIAS, GATED, GELU)
        else:
            HALVES: tl.constexpr = 2 if GATED else 1
            places = partial + (tile * segments).to(tl.int64) * (HALVES * ROWS * WIDTH) + inside
            own = places + (program - begin) * (HALVES * ROWS * WIDTH)
            tl.store(own, acc)
            if GATED:
                tl.store(own + ROWS * WIDTH, upper)
            tl.debug_barrier()  # all threads have stored before one of them says so
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == last - begin:
                acc = tl.zeros((ROWS, WIDTH), tl.float32)
                upper = acc
                for number in range(0, last - begin + 1):  # in one order, whoever comes last
                    share = places + number * (HALVES * ROWS * WIDTH)
                    acc += tl.load(share, cache_modifier=".cg")
                    if GATED:
                        upper += tl.load(share + ROWS * WIDTH, cache_modifier=".cg")
                tl.store(arrived + tile, 0)  # as the next product expects it
                _store(acc, upper, bias, out, first, left, zero, M, N, ROWS, WIDTH, BIAS, GATED, GELU)
        at += high - low


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
    arrived: Tensor | None = None,
) -> Tensor:
    """Return [M, N] the product of rows; where the tile has parts, [parts, M, N] in float32 that sum up to it.

    Args:
        x: [M, K], contiguous.
        weight: [N, K], or with an activation [2 N, K]: gate, then up; not in parts then.
        bias: [N], or [2 N].
        tile: how to cut it.
        activation: "silu" or "gelu".
        out_dtype: x's unless given.
        arrived: see `counters`; for shared tiles, which make their own if they are given none. Products that may run at
            the same time need one each.
    """
    count, columns = x.shape
    if not fits(columns, x.element_size()):
        raise ValueError(f"{columns} columns of {x.dtype} are no multiple of 16 bytes")
    gated = activation is not None
    if activation is not None:
        check_activation(activation)
    if tile.parts > 1 and (gated or tile.shared):
        raise ValueError(f"{tile} with a gate, or shared: only what is added up may come in parts")
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    shape, dtype = ((tile.parts,), torch.float32) if tile.parts > 1 else ((), out_dtype or x.dtype)
    out = torch.empty((*shape, count, rows), dtype=dtype, device=x.device)
    given = (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
        TensorDescriptor.from_tensor(weight, [tile.width, tile.step]),
        bias if bias is not None else weight,
        out,
    )
    how = {
        "ROWS": tile.rows, "WIDTH": tile.width, "STEP": tile.step, "BIAS": bias is not None, "GATED": gated,
        "GELU": activation == "gelu", "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    tiles = triton.cdiv(count, tile.rows) * triton.cdiv(rows, tile.width)
    if tile.shared:
        _share(given, how, tiles, (count, rows, columns), counters(x.device) if arrived is None else arrived)
    else:
        grid = (tiles * tile.parts,)
        _tiled_kernel[grid](*given, count, rows, columns, tile.parts, TURNED=tile.rows < LEAST, **how)
    return out


def counters(device: torch.device) -> Tensor:
    """Return zeros for shared tiles to count in; they are zeros again when a product is done."""
    return torch.zeros(multiprocessors(device), dtype=torch.int32, device=device)


def _share(
    given: tuple[Any, ...], how: dict[str, Any], tiles: int, sizes: tuple[int, int, int], arrived: Tensor
) -> None:
    """Launch a program for each multiprocessor, with room for what they have to add up."""
    device = given[3].device
    steps, programs = triton.cdiv(sizes[-1], how["STEP"]), multiprocessors(device)
    left = tiles % programs
    each = triton.cdiv(left * steps, programs)
    segments = triton.cdiv(steps, each) + 1 if left else 0
    size = how["ROWS"] * how["WIDTH"] * (2 if how["GATED"] else 1)
    partial = torch.empty(max(left * segments * size, 1), dtype=torch.float32, device=device)
    _shared_kernel[(programs,)](*given, partial, arrived, *sizes, segments, **how)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; a CPU is given a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6
