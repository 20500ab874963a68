"""Attention of one new token a row over its pages.

    o = softmax(scale q K^T) V        over the row's own keys, or the last ``window`` of them

A row's keys are cut into splits; a work list on the device says which there are, those of the longest rows first: what
begins late must not take long. A program takes one of them and one KV head: a fixed number of programs are launched,
which a CUDA graph needs, and go on to a further item where there are more. A row with one split writes its output at
once. Of other rows, the program that finishes last joins the partial results, in the order of the splits: the bits
depend on the row's own length and on how it is cut, not on who came last.
GQA: the query heads of a KV head are the rows of one matrix product, padded to 16.
Online softmax: Milakov and Gimelshein, 2018; splits: "Flash-Decoding", Dao et al., 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit, padded, varying

SPLIT = 512  # keys, where rows must be cut alike in every batch
UNIT = 64  # keys that splits grow by
PLACES = 132 * 3  # programs that run at the same time, about
PROGRAMS = 132 * 24  # launched at least, where there may be as many items: one without an item costs next to nothing
LOG2E = 1.4426950408889634
MAX_ROWS = 4096
MAX_KV_HEADS = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are cut.

    Attributes:
        split: least keys of a split, a multiple of the page. One value for all batches makes rows independent of them.
        most: splits of a row; a longer row gets longer ones. 0 is any number.
        spread: splits are longer where all keys together would make more than so many of them. 0 is any number.
    """

    split: int = SPLIT
    most: int = 0
    spread: int = 0

    def capacity(self, rows: int, longest: int) -> int:
        """Return how many splits there can be of rows with up to ``longest`` keys."""
        each = -(-longest // self.split)
        found = rows * (min(each, self.most) if self.most else each)
        return min(found, 2 * rows + self.spread) if self.spread else found  # a row's first and last are not whole


EVEN = Cut()


@dataclass(frozen=True, slots=True)
class WorkList:
    """Which splits there are, for one window; valid until lengths change.

    Attributes:
        items: [capacity, 4] int32: the row, its first key, the row's keys, and its table row (-1: not known).
        total: [2] int32, how many items there are, and the keys of one, unless its row has more than ``most`` such.
        arrived: [B, MAX_KV_HEADS] int32, how many splits of a row are done; all 0 between launches.
        most: splits of a row; 0 is any number.
        listed: whether the items name table rows.
    """

    items: Tensor
    total: Tensor
    arrived: Tensor
    most: int = 0
    listed: bool = False


def cut_for(rows: int, kv_heads: int) -> Cut:
    """Return how to cut the rows of a batch; measured on one H200."""
    if rows <= 16:
        return Cut(64 if rows <= 2 else 128 if rows <= 8 else 256, most=16)
    places = PLACES * 3 // 5 if 24 < rows <= 40 else PLACES  # there, a second and shorter round of splits cost more
    return Cut(256, most=16, spread=max(places // kv_heads, 1))


@jit
def _cut(length: tl.tensor, window: int, split: int, most: int) -> tuple[tl.tensor, ...]:
    """Return the first key of the first split, the keys of a split, and how many splits there are."""
    oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first = oldest // split
    units = tl.where(length > 0, (length + split - 1) // split - first, 0)
    each = tl.where(most > 0, tl.maximum((units + most - 1) // tl.maximum(most, 1), 1), 1)
    return first * split, each * split, (units + each - 1) // each


@varying("rows", "window", "split", "most", "spread")
def _list_kernel(
    lengths: tl.tensor,
    table_rows: tl.tensor,
    items: tl.tensor,
    total: tl.tensor,
    arrived: tl.tensor,
    rows: int,
    window: int,
    split: int,
    most: int,
    spread: int,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    others = tl.load(lengths + lane, mask=lane < rows, other=0)
    length = tl.load(lengths + row)
    if spread > 0:
        keys = tl.sum(tl.where(window > 0, tl.minimum(others, window), others), 0)
        split = tl.maximum(split, tl.cdiv(tl.cdiv(keys, spread), UNIT) * UNIT)
    _, _, counts = _cut(others, window, split, most)
    longer = (others > length) | ((others == length) & (lane < row))
    begin = tl.sum(tl.where(longer, counts, 0), 0)
    tl.store(total, tl.sum(counts, 0), mask=row == 0)
    tl.store(total + 1, split, mask=row == 0)
    tl.store(arrived + row * HEADS + tl.arange(0, HEADS), tl.zeros((HEADS,), tl.int32))
    low, each, count = _cut(length, window, split, most)
    table_row = tl.load(table_rows + row).to(tl.int32) if LISTED else -1
    for at in range(0, count, CHUNK):
        part = at + tl.arange(0, CHUNK)
        item = items + (begin + part) * 4
        tl.store(item, tl.zeros_like(part) + row, mask=part < count)
        tl.store(item + 1, low + part * each, mask=part < count)
        tl.store(item + 2, tl.zeros_like(part) + length, mask=part < count)
        tl.store(item + 3, tl.zeros_like(part) + table_row, mask=part < count)


def list_splits(
    lengths: Tensor,
    capacity: int,
    window: int = 0,
    cut: Cut = EVEN,
    table_rows: Tensor | None = None,
) -> WorkList:
    """Return the work list of rows with these lengths, the longest first; rows of length 0 have no work.

    Args:
        lengths: [B] int32, keys of each row, its new token's included.
        capacity: most splits there can be.
        window: how many of the last keys count; 0 is all.
        cut: how to cut them.
        table_rows: [B] int32; if given here, those given to ``paged_attention`` are not read, which saves it a wait.
    """
    count, device = len(lengths), lengths.device
    if count > MAX_ROWS:
        raise ValueError(f"{count} rows are more than {MAX_ROWS}")
    items = torch.empty((capacity, 4), dtype=torch.int32, device=device)
    total = torch.empty(2, dtype=torch.int32, device=device)
    arrived = torch.empty((count, MAX_KV_HEADS), dtype=torch.int32, device=device)
    _list_kernel[(count,)](
        lengths, lengths if table_rows is None else table_rows, items, total, arrived, count, window, cut.split,
        cut.most, cut.spread, LANES=padded(count), HEADS=MAX_KV_HEADS, CHUNK=16, UNIT=UNIT,
        LISTED=table_rows is not None, num_warps=1,
    )  # fmt: skip
    return WorkList(items, total, arrived, cut.most, table_rows is not None)


@jit
def _attend_span(
    query: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    scale: float,
    cap: float,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return peak [G], mass [G] and sum [G, D] of keys low .. high."""
    dim, key = tl.arange(0, DIM_PAD), tl.arange(0, PAGE)
    peak = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    mass = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    last = (high + PAGE - 1) // PAGE
    block = tl.load(table + low // PAGE)
    for page in range(low // PAGE, last):
        base = block.to(tl.int64) * (KV_HEADS * PAGE * DIM)
        block = tl.load(table + page + 1, mask=page + 1 < last, other=0)  # read ahead, so that pages can be, too
        at = page * PAGE + key
        across = key[None, :] * DIM + dim[:, None]
        keys = tl.load(k_head + base + across, mask=(dim < DIM)[:, None], other=0.0)  # [D, P]
        # What a page holds past its end may be anything. Left out in the load, it costs nothing more.
        held = (at < high)[:, None] & (dim < DIM)[None, :]
        values = tl.load(v_head + base + key[:, None] * DIM + dim[None, :], mask=held, other=0.0)
        logits = tl.dot(query, keys, input_precision="ieee") * scale  # [G, P], of base 2 unless capped
        if CAPPED:
            ratio = logits / cap
            logits = cap * 1.4426950408889634 * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)  # tanh
        logits = tl.where(((at >= low) & (at < high))[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(logits - new_peak[:, None])
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mass = mass * shrink + tl.sum(weights, 1)
        peak = new_peak
    return peak, mass, acc


@jit
def _join(
    partial: tl.tensor,
    sums: tl.tensor,
    target: tl.tensor,
    place: tl.tensor,
    count: tl.tensor,
    GROUP: tl.constexpr,
    TIGHT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Store the joint result of a row's splits; ``place`` is the first one's first head among all partial results."""
    part, line, dim = tl.arange(0, CHUNK), tl.arange(0, TIGHT), tl.arange(0, DIM_PAD)
    peak = tl.full((TIGHT,), float("-inf"), tl.float32)
    mass = tl.zeros((TIGHT,), tl.float32)
    acc = tl.zeros((TIGHT, DIM_PAD), tl.float32)
    for at in range(0, count, CHUNK):
        there = (at + part < count)[:, None] & (line < GROUP)[None, :]
        source = place + (at + part)[:, None] * (KV_HEADS * GROUP) + line[None, :]
        # Others wrote these: a cache that is this multiprocessor's own does not know them.
        logs = tl.load(sums + source, mask=there, other=float("-inf"), cache_modifier=".cg")  # [S, G]
        inside = there[:, :, None] & (dim < DIM)[None, None, :]
        results = tl.load(
            partial + source[:, :, None] * DIM + dim[None, None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a line that only pads
        shrink, shares = tl.exp2(peak - safe), tl.exp2(logs - safe[None, :])
        acc = acc * shrink[:, None] + tl.sum(shares[:, :, None] * results, 0)
        mass = mass * shrink + tl.sum(shares, 0)
        peak = new_peak
    inside = (line < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(target + line[:, None] * DIM + dim[None, :], acc / mass[:, None], mask=inside)


@varying("window", "most")
def _attend_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    tables: tl.tensor,
    table_rows: tl.tensor,
    items: tl.tensor,
    total: tl.tensor,
    arrived: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    table_stride: int,
    scale: float,
    cap: float,
    window: int,
    most: int,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TIGHT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ARRIVED: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    head, item = tl.program_id(0), tl.program_id(1)
    release(DEPENDENT)
    wait(DEPENDENT)
    # The item is read beside the total, not after it: the first one is there whatever the total.
    at = items + item * 4
    row, low, length, table_row = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    end, split = tl.load(total), tl.load(total + 1)
    line, dim = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    inside = (line < GROUP)[:, None] & (dim < DIM)[None, :]
    tile = line[:, None] * DIM + dim[None, :]
    while item < end:
        begin, each, count = _cut(length, window, split, most)
        if not LISTED:
            table_row = tl.load(table_rows + row).to(tl.int32)
        heads = (row.to(tl.int64) * KV_HEADS + head) * GROUP
        query = tl.load(q + heads * DIM + tile, mask=inside, other=0.0)  # [G, D]
        oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        peak, mass, acc = _attend_span(
            query, k_pages + head * (PAGE * DIM), v_pages + head * (PAGE * DIM),
            tables + table_row.to(tl.int64) * table_stride, tl.maximum(low, oldest), tl.minimum(low + each, length),
            scale, cap, GROUP_PAD, KV_HEADS, DIM, DIM_PAD, PAGE, CAPPED,
        )  # fmt: skip
        result = acc / mass[:, None]
        if count == 1:
            tl.store(out + heads * DIM + tile, result, mask=inside)
        else:
            place = (item.to(tl.int64) * KV_HEADS + head) * GROUP
            tl.store(partial + place * DIM + tile, result, mask=inside)
            tl.store(sums + place + line, peak + tl.log2(mass), mask=line < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + row * ARRIVED + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter, 0)  # for the next launch
                place -= ((low - begin) // each).to(tl.int64) * (KV_HEADS * GROUP)
                _join(
                    partial, sums, out + heads * DIM, place, count, GROUP, TIGHT, KV_HEADS, DIM, DIM_PAD, CHUNK
                )  # fmt: skip
        item += tl.num_programs(1)
        more = item < end
        at = items + item * 4
        row, low = tl.load(at, mask=more, other=0), tl.load(at + 1, mask=more, other=0)
        length, table_row = tl.load(at + 2, mask=more, other=0), tl.load(at + 3, mask=more, other=0)


def _settings(rows: int, row_bytes: int, full: bool) -> dict[str, int]:
    """Return warps and stages, measured on one H200.

    Many small programs hide the latency of memory where there are enough rows for them. Full precision multiplies
    without matrix units and needs the registers of more warps, as large heads do.
    """
    if full:
        return {"num_warps": 4, "num_stages": 2 if row_bytes <= 512 else 1}
    if row_bytes > 256:
        return {"num_warps": 4, "num_stages": 2}
    if rows <= 2:
        return {"num_warps": 4, "num_stages": 3}
    return {"num_warps": 1, "num_stages": 3} if rows <= 40 else {"num_warps": 2, "num_stages": 2}


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
    out: Tensor | None = None,
    dependent: bool = False,
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
        out: where to write it, contiguous; a new tensor unless given.
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    batch, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    if kv_heads > MAX_KV_HEADS:
        raise ValueError(f"{kv_heads} KV heads are more than {MAX_KV_HEADS}")
    out = torch.empty_like(q) if out is None else out
    capacity = len(work.items)
    partial = torch.empty((capacity, heads, dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((capacity, heads), dtype=torch.float32, device=q.device)
    shape = {"DIM": dim, "DIM_PAD": padded(dim)}
    group = heads // kv_heads
    settings = _settings(batch, dim * q.element_size(), q.dtype is torch.float32)
    tight = triton.next_power_of_2(group)
    room = 2048 * settings["num_warps"] // (tight * padded(dim))  # what fits in registers
    _attend_kernel[(kv_heads, min(capacity, max(triton.cdiv(PROGRAMS, kv_heads), 2 * batch)))](
        q, k_pages, v_pages, tables, table_rows, work.items, work.total, work.arrived, out, partial, sums,
        tables.stride(0), scale if soft_cap else scale * LOG2E, soft_cap, window, work.most,
        GROUP=group, GROUP_PAD=padded(group), TIGHT=tight, KV_HEADS=kv_heads, PAGE=page, ARRIVED=MAX_KV_HEADS,
        CHUNK=min(max(room, 2), 16), CAPPED=soft_cap > 0, LISTED=work.listed, **shape, **settings,
        **launching(dependent, q.device),
    )  # fmt: skip
    return out
