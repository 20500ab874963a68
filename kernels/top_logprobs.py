"""Logprobs of a given token and of the best N, and the given token's rank, without a log-softmax of the row.

    value(i) = min(0, (x_i - m) - log sum_j exp(x_j - m)),  m = max x
    rank(i)  = 1 + #{x_j > x_i} + #{x_j = x_i, j < i}

One pass over the row is enough: candidates for the best are in the few groups whose largest are (see `selection`), and
only those are sorted. Entries whose candidates are too many for that, as where thousands of logits are equal, first
take the walk that finds the N-th best exactly.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import (
    BLOCK,
    GROUP,
    LINES,
    MAX_BLOCKS,
    MAX_WIDTH,
    PART,
    POOL,
    SHORT,
    STRIDE,
    blocks,
    check_columns,
    check_logits,
    floats,
    ints,
    jit,
    longs,
    padded,
    settings,
    varying,
)
from slotline.kernels.logsumexp import block_sum, join
from slotline.kernels.ordering import LOWEST_KEY, id_in, invalid, key_in, ordered_key, packed, value_of
from slotline.kernels.results import TopLogprobs
from slotline.kernels.selection import (
    best_of_pool,
    gather_best,
    nth_equal,
    nth_key,
    pool_part,
    ranks_in_pool,
)


@varying("columns")
def _survey_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    rows: tl.tensor,
    given: tl.tensor,
    widths: tl.tensor,
    columns: int,
    peaks: tl.tensor,
    sums: tl.tensor,
    flags: tl.tensor,
    ahead: tl.tensor,
    tops: tl.tensor,
    tops_stride: int,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    entry, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry).to(tl.int64)
    if row >= 0:
        token = tl.load(given + entry)
        own = tl.load(logits + row * stride + token)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        wrong = invalid(x)
        x = tl.where(wrong, float("-inf"), x)
        peak, total = block_sum(x)
        place = entry * tl.num_programs(1) + block
        tl.store(peaks + place, peak)
        tl.store(sums + place, total)
        tl.store(flags + place, tl.max(wrong.to(tl.int32), 0))
        tl.store(ahead + place, tl.sum(((x > own) | ((x == own) & (ids < token))).to(tl.int32), 0))
        if tl.minimum(tl.load(widths + entry), columns) > 0:
            largest = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
            lane = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(tops + entry.to(tl.int64) * tops_stride + lane, largest)


@jit
def _walk(row: tl.tensor, vocab: int, width: tl.tensor, pool: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Put exactly the best ``width`` of a row into its pool, or all if they are fewer; return how many."""
    one, floor = tl.full([], 1.0, tl.float32), tl.full([], LOWEST_KEY, tl.uint32)
    cut, quota = nth_key(row, vocab, one, floor, width, BLOCK)
    cut_id = nth_equal(row, vocab, one, cut, quota.to(tl.int64), BLOCK)
    filled = tl.full([], 0, tl.int32)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        key = ordered_key(tl.load(row + ids, mask=ids < vocab, other=float("-inf")))
        chosen = ((key > cut) | ((key == cut) & (ids <= cut_id))).to(tl.int32)
        place = pool + filled + tl.cumsum(chosen, 0) - 1
        tl.store(place, packed(key, ids).to(tl.int64, bitcast=True), mask=chosen != 0)
        filled += tl.sum(chosen, 0)
    return filled


@jit
def _tell(
    entries: tl.tensor,
    places: tl.tensor,
    stay: tl.tensor,
    columns: int,
    peak: tl.tensor,
    log: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Write a line of the table: the best ``stay`` entries to their places, and nothing behind them."""
    inside = places < stay
    x = tl.where(inside, value_of(key_in(entries)), peak)
    tl.store(ids + places, id_in(entries), mask=inside)
    tl.store(values + places, tl.minimum((x - peak) - log, 0.0), mask=inside)
    lane = tl.arange(0, COLUMNS)
    behind = (lane >= stay) & (lane < columns)
    tl.store(ids + lane, tl.full([COLUMNS], -1, tl.int32), mask=behind)
    tl.store(values + lane, tl.full([COLUMNS], float("-inf"), tl.float32), mask=behind)


@varying("columns")
def _own_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    rows: tl.tensor,
    given: tl.tensor,
    widths: tl.tensor,
    columns: int,
    block_peaks: tl.tensor,
    block_sums: tl.tensor,
    flags: tl.tensor,
    ahead: tl.tensor,
    tops: tl.tensor,
    tops_stride: int,
    own: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    status: tl.tensor,
    peaks: tl.tensor,
    logs: tl.tensor,
    counters: tl.tensor,
    listed: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    count: int,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    SHORT: tl.constexpr,
    PART: tl.constexpr,
    POOL: tl.constexpr,
) -> None:
    entry = tl.program_id(0)
    row = tl.load(rows + entry).to(tl.int64)
    if row >= 0:
        lane = tl.arange(0, WIDTH)
        place, inside = entry * count + lane, lane < count
        part = tl.load(block_peaks + place, mask=inside, other=float("-inf"))
        sums, bad = tl.load(block_sums + place, mask=inside, other=0.0), tl.load(flags + place, mask=inside, other=0)
        peak, log, state = join(part, sums, bad)
        x = tl.load(logits + row * stride + tl.load(given + entry))
        below = tl.where(state == 0, x, 0.0) - tl.where(state == 0, peak, 0.0)
        tl.store(own + entry, tl.where(state == 0, tl.minimum(below - log, 0.0), float("-inf")))
        tl.store(ranks + entry, 1 + tl.sum(tl.load(ahead + place, mask=inside, other=0), 0))
        tl.store(status + entry, state)
        tl.store(peaks + entry, peak)
        tl.store(logs + entry, log)
        width, found = tl.minimum(tl.load(widths + entry), columns), tl.full([], 0, tl.int32)
        mine = pool + entry.to(tl.int64) * POOL
        if (state == 0) & (width > 0):
            one, floor = tl.full([], 1.0, tl.float32), tl.full([], LOWEST_KEY, tl.uint32)
            start, scratch = logits + row * stride, listed + entry.to(tl.int64) * POOL
            groups = tops + entry.to(tl.int64) * tops_stride
            found = gather_best(start, vocab, one, groups, width, floor, scratch, mine, TOPS, GROUP, LINES, POOL)
            tl.debug_barrier()  # other threads read the pool than wrote it
        tl.store(counters + entry, found)
        if found <= SHORT:
            stay, line = tl.minimum(tl.maximum(width, 0), found), entry.to(tl.int64) * columns
            tl.store(counts + entry, stay)
            entries = pool_part(mine, 0, found, SHORT)
            rank = ranks_in_pool(entries, mine, found, PART)
            base = tl.where(state == 0, peak, 0.0)
            _tell(entries, rank, stay, columns, base, log, ids + line, values + line, COLUMNS)


@varying("columns")
def _many_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    rows: tl.tensor,
    widths: tl.tensor,
    columns: int,
    peaks: tl.tensor,
    logs: tl.tensor,
    counters: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    counts: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    POOL: tl.constexpr,
) -> None:
    """Tell the best of entries with many candidates; where they are too many, the pool gets exactly the best first."""
    entry = tl.program_id(0)
    row = tl.load(rows + entry).to(tl.int64)
    if row >= 0:
        found = tl.load(counters + entry)
        if found > SHORT:
            width, mine = tl.minimum(tl.load(widths + entry), columns), pool + entry.to(tl.int64) * POOL
            if found > POOL:
                found = _walk(logits + row * stride, vocab, width, mine, BLOCK)
                tl.debug_barrier()  # other threads read the pool than wrote it
            stay, place = tl.minimum(width, found), entry.to(tl.int64) * columns
            tl.store(counts + entry, stay)
            entries, peak, log = best_of_pool(mine, found, POOL), tl.load(peaks + entry), tl.load(logs + entry)
            _tell(entries, tl.arange(0, POOL), stay, columns, peak, log, ids + place, values + place, COLUMNS)


def top_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, widths: Tensor, columns: int) -> TopLogprobs:
    """Return logprobs of M entries.

    Args:
        logits: [R, V] float32.
        rows: [M] int32, the row of each entry; -1 is none: it costs nothing, and its results are not written.
        tokens: [M] int32, the given token, 0 .. V - 1.
        widths: [M] int32, how many of the best to tell; 0 is none.
        columns: N, the width of the table, at most V and 1024; wider entries are clipped to it.
    """
    _, vocab = check_logits(logits)
    count = len(rows)
    integers = {"rows": rows, "tokens": tokens, "widths": widths}
    check_columns(count, logits.device, **{name: (column, torch.int32) for name, column in integers.items()})
    if not 0 <= columns <= MAX_WIDTH:
        raise ValueError(f"{columns} columns are not between 0 and {MAX_WIDTH}")
    columns, device = min(columns, vocab), logits.device
    own, values, ids = floats(device, count), floats(device, count, columns), ints(device, count, columns)
    out = TopLogprobs(own, ints(device, count), ids, values, ints(device, count), ints(device, count))
    if count:
        _launch(logits, rows, tokens, widths, columns, out)
    return out


def _launch(x: Tensor, rows: Tensor, tokens: Tensor, widths: Tensor, columns: int, out: TopLogprobs) -> None:
    entries, vocab, count, device = len(rows), x.shape[1], blocks(x.shape[1]), x.device
    groups = padded(count * (BLOCK // GROUP))
    block_peaks, sums = floats(device, entries, count), floats(device, entries, count)
    flags, ahead = ints(device, entries, count), ints(device, entries, count)
    tops, pool = floats(device, entries, groups), longs(device, entries, POOL)
    peaks, logs = floats(device, entries), floats(device, entries)
    listed, counters = ints(device, entries, POOL), ints(device, entries)
    start, every, lines = (x, x.stride(0), vocab, rows), (entries, count), (entries,)

    parts = (tokens, widths, columns, block_peaks, sums, flags, ahead, tops, groups)
    _survey_kernel[every](*start, *parts, BLOCK=BLOCK, GROUP=GROUP, **settings("pass"))
    table, sizes = (out.ids, out.values), {"COLUMNS": padded(columns), "SHORT": SHORT, "POOL": POOL}
    row = (out.own, out.ranks, out.counts, out.status, peaks, logs, counters, listed, pool, *table, count)
    widest = {"WIDTH": MAX_BLOCKS, "TOPS": groups, "GROUP": GROUP, "LINES": LINES, "PART": PART}
    _own_kernel[lines](*start, *parts, *row, **sizes, **widest, **settings("combine"))
    if columns:
        left = (widths, columns, peaks, logs, counters, pool, *table, out.counts)
        _many_kernel[lines](*start, *left, **sizes, BLOCK=STRIDE, **settings("walk"))
