"""Attention of one new token a row over its pages.

    o = softmax(scale q K^T) V        over the row's own keys, or the last ``window`` of them

A row's keys are cut into splits of fixed length; a work list on the device says which (row, split) pairs there are,
and a fixed number of programs share it. So the grid is static, which a CUDA graph needs, rows of any length mix, and
the order of every sum depends on the row's own length alone. A row with one split writes its output at once; for others
a second kernel joins the partial results. GQA: the query heads of a KV head are the rows of one matrix product, padded
to 16.
Online softmax: Milakov and Gimelshein, 2018; splits: "Flash-Decoding", Dao et al., 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import jit, padded

SPLIT = (
    512  # keys, unless a work list says otherwise: short ones fill the machine at small batches, long ones save joins
)
PROGRAMS = 132 * 16  # one warp each; together they fill the machine's memory pipes
LOG2E = 1.4426950408889634
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class WorkList:
    """Which splits there are, for one window; valid until lengths change.

    Attributes:
        first: [B + 1] int32, the items of row b are ``first[b] .. first[b + 1]``.
        rows: [capacity] int32, whose item it is.
        split: keys of an item.
    """

    first: Tensor
    rows: Tensor
    split: int = SPLIT


@jit
def _count_kernel(
    lengths: tl.tensor, first: tl.tensor, rows: int, window: int, LANES: tl.constexpr, SPLIT: tl.constexpr
) -> None:
    lane = tl.arange(0, LANES)
    length = tl.load(lengths + lane, mask=lane < rows, other=0)
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    count = tl.where(length > 0, (length + SPLIT - 1) // SPLIT - begin // SPLIT, 0)
    tl.store(first + lane + 1, tl.cumsum(count, 0), mask=lane < rows)
    tl.store(first + lane, tl.zeros_like(count), mask=lane == 0)


@jit
def _list_kernel(first: tl.tensor, rows: tl.tensor, CHUNK: tl.constexpr) -> None:
    row = tl.program_id(0)
    begin, end = tl.load(first + row), tl.load(first + row + 1)
    for at in range(begin, end, CHUNK):
        lane = at + tl.arange(0, CHUNK)
        tl.store(rows + lane, tl.full((CHUNK,), 0, tl.int32) + row, mask=lane < end)


def list_splits(lengths: Tensor, capacity: int, window: int = 0, split: int = SPLIT) -> WorkList:
    """Return the work list of rows with these lengths; rows of length 0 have no work.

    Args:
        lengths: [B] int32, keys of each row, its new token's included.
        capacity: most splits there can be.
        window: how many of the last keys count; 0 is all.
        split: keys of an item, a multiple of the page. One value for all batches makes rows independent of them.
    """
    count = len(lengths)
    if count > MAX_ROWS:
        raise ValueError(f"{count} rows are more than {MAX_ROWS}")
    first = torch.empty(count + 1, dtype=torch.int32, device=lengths.device)
    rows = torch.empty(capacity, dtype=torch.int32, device=lengths.device)
    _count_kernel[(1,)](lengths, first, count, window, LANES=padded(count), SPLIT=split, num_warps=4)
    _list_kernel[(count,)](first, rows, CHUNK=16, num_warps=1)
    return WorkList(first, rows, split)


@jit
def _attend_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    tables: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    first: tl.tensor,
    item_rows: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    table_stride: int,
    batch: int,
    scale: float,
    cap: float,
    window: int,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    total = tl.load(first + batch)
    line, dim, key = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD), tl.arange(0, PAGE)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row = tl.load(item_rows + item)
        begin_item, end_item = tl.load(first + row), tl.load(first + row + 1)
        length = tl.load(lengths + row)
        oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        split = item - begin_item + oldest // SPLIT
        low = split * SPLIT
        high = tl.minimum(low + SPLIT, length)
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        inside = (line < GROUP)[:, None] & (dim < DIM)[None, :]
        heads = (row.to(tl.int64) * KV_HEADS + head) * GROUP
        query = tl.load(q + (heads + line)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)  # [G, D]
        peak = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        mass = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
        for page in range(tl.maximum(low, oldest) // PAGE, (high + PAGE - 1) // PAGE):
            block = tl.load(table + page).to(tl.int64)
            base = (block * KV_HEADS + head) * PAGE * DIM
            fits = (dim < DIM)[:, None]
            keys = tl.load(k_pages + base + key[None, :] * DIM + dim[:, None], mask=fits, other=0.0)  # [D, P]
            logits = tl.dot(query, keys, input_precision="ieee") * scale  # [G, P]
            if CAPPED:
                ratio = logits / cap
                logits = cap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)  # tanh
            logits = logits * 1.4426950408889634
            at = page * PAGE + key
            seen = (at >= oldest) & (at < high)
            logits = tl.where(seen[None, :], logits, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            shrink = tl.exp2(peak - new_peak)
            weights = tl.exp2(logits - new_peak[:, None])
            values = tl.load(v_pages + base + key[:, None] * DIM + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
            values = tl.where(seen[:, None], values, 0.0)  # what a page holds past its end may be anything
            acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            mass = mass * shrink + tl.sum(weights, 1)
            peak = new_peak
        result = acc / mass[:, None]
        if end_item - begin_item == 1:
            tl.store(out + (heads + line)[:, None] * DIM + dim[None, :], result, mask=inside)
        else:
            place = ((tl.full((), 0, tl.int64) + item) * KV_HEADS + head) * GROUP + line
            tl.store(partial + place[:, None] * DIM + dim[None, :], result, mask=inside)
            tl.store(sums + place, peak + tl.log2(mass), mask=line < GROUP)


@jit
def _join_kernel(
    partial: tl.tensor,
    sums: tl.tensor,
    first: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(first + row), tl.load(first + row + 1)
    if end - begin > 1:
        dim = tl.arange(0, DIM_PAD)
        peak = tl.full((), float("-inf"), tl.float32)
        mass = tl.zeros((), tl.float32)
        acc = tl.zeros((DIM_PAD,), tl.float32)
        for item in range(begin, end):
            place = (tl.full((), 0, tl.int64) + item) * HEADS + head
            weight = tl.load(sums + place)
            new_peak = tl.maximum(peak, weight)
            shrink, share = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
            acc = acc * shrink + share * tl.load(partial + place * DIM + dim, mask=dim < DIM, other=0.0)
            mass = mass * shrink + share
            peak = new_peak
        tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + dim, acc / mass, mask=dim < DIM)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    work: WorkList,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return [B, Hq, D] the attention of one query a row; rows of length 0 keep what is in memory.

    Args:
        q: [B, Hq, D].
        k_pages, v_pages: [blocks, Hkv, P, D], P at least 16.
        tables: [S, pages] int32, the blocks of each table row.
        table_rows: [B] int32, the table row of each row.
        lengths: [B] int32, keys of each row.
        work: from ``list_splits`` with the same lengths and window.
        window: how many of the last keys count; 0 is all.
        soft_cap: logits x become cap tanh(x / cap); 0 is off.
    """
    batch, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    out = torch.empty_like(q)
    capacity = len(work.rows)
    partial = torch.empty((capacity, heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((capacity, heads), dtype=torch.float32, device=q.device)
    programs = min(capacity, triton.cdiv(PROGRAMS, kv_heads))
    shape = {"DIM": dim, "DIM_PAD": padded(dim)}
    _attend_kernel[(programs, kv_heads)](
        q, k_pages, v_pages, tables, table_rows, lengths, work.first, work.rows, out, partial, sums,
        tables.stride(0), batch, scale, soft_cap, window,
        GROUP=heads // kv_heads, GROUP_PAD=padded(heads // kv_heads), KV_HEADS=kv_heads, PAGE=page, SPLIT=work.split,
        CAPPED=soft_cap > 0, **shape, num_warps=4, num_stages=2,
    )  # fmt: skip
    _join_kernel[(batch, heads)](partial, sums, work.first, out, HEADS=heads, **shape, num_warps=1)
    return out
