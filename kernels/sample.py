"""Draw one token a row after temperature, min_p, top_k and top_p, without sorting the vocabulary.

With s = x / T, m = max s, w = weight(s) = floor(2**44 exp(s - m)), candidates ordered by falling s, then rising id:

    min_p   keeps s >= m + log min_p
    top_k   keeps the first k of them
    top_p   keeps those whose predecessors weigh less than ceil(p W), W the weight of what is left; always the first
    draw    the first id in id order where the cumulative weight exceeds floor(u W'), W' the weight of what is left then

T = 0 takes the best. u has 53 bits (see `philox`). All sums are of integers, so the outcome is exact, and the same
however the row is split. Holtzman et al., "The curious case of neural text degeneration", 2020 (top_p); Nguyen et al.,
"Turning up the heat: min-p sampling", 2024; FlashInfer and Qrita (arXiv 2602.01518) showed that it needs no sort.

Five launches: the best of blocks and groups; the row's peak, a bound on its candidates, and the candidates, from the
groups that reach it; weights of blocks, which rows with top_k do not need; the draw, from block weights or from few
candidates; and the rest, from many candidates, or by a walk over rows that have too many. All but the first return at
once for rows that do not need them.
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
    programs,
    settings,
)
from slotline.kernels.ordering import (
    LOWEST_KEY,
    WEIGHT_BITS,
    WEIGHT_MASK,
    id_in,
    invalid,
    key_in,
    ordered_key,
    packed,
    score,
    value_of,
    weight,
)
from slotline.kernels.philox import random_bits
from slotline.kernels.results import Sampled
from slotline.kernels.selection import (
    best_of_pool,
    floor_key,
    gather_best,
    nth_equal,
    nth_key,
    pool_part,
    ranks_in_pool,
)

_WANTED = tl.constexpr(1024)  # groups whose largest pass where top_p alone cuts the row off


@jit
def _by_rank(top_k: tl.tensor, vocab: int) -> tl.tensor:
    return (top_k > 0) & (top_k < vocab)


@jit
def _reads_pool(top_k: tl.tensor, top_p: tl.tensor, vocab: int) -> tl.tensor:
    return _by_rank(top_k, vocab) | (top_p < 1.0)


@jit
def _peaks_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    bests: tl.tensor,
    flags: tl.tensor,
    tops: tl.tensor,
    tops_stride: int,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    place = row * tl.num_programs(1) + block
    # Logits, not scores: what is largest stays so when all are divided.
    tl.store(bests + place, tl.max(packed(ordered_key(x), ids), 0).to(tl.int64, bitcast=True))
    tl.store(flags + place, tl.max(invalid(x).to(tl.int32), 0))
    if (tl.load(temperatures + row) > 0) & _reads_pool(tl.load(top_ks + row), tl.load(top_ps + row), vocab):
        largest = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
        lane = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(tops + row.to(tl.int64) * tops_stride + lane, largest)


@jit
def _bounds_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    bests: tl.tensor,
    flags: tl.tensor,
    tops: tl.tensor,
    tops_stride: int,
    tokens: tl.tensor,
    status: tl.tensor,
    cut_keys: tl.tensor,
    cut_ids: tl.tensor,
    peaks: tl.tensor,
    counters: tl.tensor,
    listed: tl.tensor,
    pool: tl.tensor,
    count: int,
    WIDTH: tl.constexpr,
    TOPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    POOL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, WIDTH)
    entry = tl.load(bests + row * count + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)
    best = tl.max(entry, 0)
    bad = tl.max(tl.load(flags + row * count + lane, mask=lane < count, other=0), 0) != 0
    largest = tl.where(bad, 0.0, value_of(key_in(best)))
    peak = tl.max(score(tl.full([1], 0.0, tl.float32) + largest, temperature), 0)  # what `score` divides has a shape
    state = tl.where(bad, 2, tl.where(ordered_key(peak) < LOWEST_KEY, 1, 0))
    tl.store(tokens + row, tl.where(state == 0, id_in(best), 0))
    tl.store(status + row, state)
    tl.store(cut_keys + row, 0)
    tl.store(cut_ids + row, vocab)
    if (state == 0) & (temperature > 0):
        floor = floor_key(peak, tl.load(log_min_ps + row))
        tl.store(peaks + row, peak)
        tl.store(cut_keys + row, floor.to(tl.int64))
        top_k = tl.load(top_ks + row)
        if _reads_pool(top_k, tl.load(top_ps + row), vocab):
            some = tl.minimum(_WANTED, (vocab + GROUP - 1) // GROUP // 2)
            wanted = tl.where(_by_rank(top_k, vocab), top_k, some)
            line, mine = row.to(tl.int64), row.to(tl.int64) * POOL
            start, groups = logits + line * stride, tops + line * tops_stride
            found = gather_best(
                start, vocab, temperature, groups, wanted, floor, listed + mine, pool + mine, TOPS, GROUP, LINES, POOL
            )
            tl.store(counters + row, found)


@jit
def _weights_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    status: tl.tensor,
    cut_keys: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    temperature, by_rank = tl.load(temperatures + row), _by_rank(tl.load(top_ks + row), vocab)
    if (temperature > 0) & (tl.load(status + row) == 0) & (not by_rank):
        floor, peak = tl.load(cut_keys + row).to(tl.uint32), tl.load(peaks + row)
        for block in range(tl.program_id(1), count, tl.num_programs(1)):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
            s = score(x, temperature)
            w = tl.where(ordered_key(s) >= floor, weight(s, peak), 0)
            tl.store(sums + row * count + block, tl.sum(w, 0).to(tl.int64))


@jit
def _limit(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the weight at which top_p stops, at least 1 so that the first candidate stays."""
    share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64).to(tl.uint64)
    return tl.maximum(share, tl.full([], 1, tl.uint64))


@jit
def _blocks_weights(sums: tl.tensor, count: int, top_k: tl.tensor, vocab: int, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] what a row's blocks weigh; nothing where top_k leaves that to its candidates."""
    lane = tl.arange(0, WIDTH)
    there = (lane < count) & (not _by_rank(top_k, vocab))
    return tl.load(sums + lane, mask=there, other=0).to(tl.uint64)


@jit
def _draw_from_blocks(
    row: tl.tensor,
    vocab: int,
    temperature: tl.tensor,
    floor: tl.tensor,
    peak: tl.tensor,
    sums: tl.tensor,
    target: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the token of a row that only min_p cuts off: its block from the blocks' weights [WIDTH], then its id."""
    reached = tl.cumsum(sums, 0)
    block = tl.sum((reached <= target).to(tl.int32), 0)
    before = tl.max(tl.where(reached <= target, reached, 0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
    s = score(x, temperature)
    w = tl.where(ordered_key(s) >= floor, weight(s, peak), 0)
    return block * BLOCK + tl.sum((before + tl.cumsum(w, 0) <= target).to(tl.int32), 0)


@jit
def _value_or_nothing(entries: tl.tensor) -> tl.tensor:
    """Return the scores of packed entries, -inf where there is none."""
    return tl.where(entries != 0, value_of(key_in(entries)), float("-inf"))


@jit
def _draw_from_few(
    pool: tl.tensor,
    found: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    vocab: int,
    peak: tl.tensor,
    total: tl.tensor,
    bits: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
) -> tl.tensor:
    """Return the token, the last entry that stays, and whether the candidates were enough to tell."""
    entries = pool_part(pool, 0, found, WIDTH)
    rank = ranks_in_pool(entries, pool, found, PART)
    by_rank = _by_rank(top_k, vocab)
    last = tl.where(by_rank, tl.minimum(top_k, found), found)
    w = weight(tl.where(rank < last, value_of(key_in(entries)), float("-inf")), peak)
    have = tl.sum(w, 0)
    limit = _limit(top_p, tl.where(by_rank, have, total))
    reached = tl.zeros([WIDTH], tl.uint64)  # whatever is before one that counts does count
    for begin in range(0, found, PART):
        other = pool_part(pool, begin, found, PART)
        each = weight(_value_or_nothing(other), peak)
        reached += tl.sum(tl.where(other[None, :] > entries[:, None], each[None, :], 0), 1)
    nucleus = tl.sum(((reached < limit) & (rank < last)).to(tl.int32), 0)
    stay = tl.where(top_p < 1.0, tl.minimum(last, nucleus), last)
    cut = tl.max(tl.where(rank == stay - 1, entries, 0), 0)
    target = tl.umulhi(bits << 11, tl.sum(tl.where(rank < stay, w, 0), 0))
    ids, passed = id_in(entries), tl.zeros([WIDTH], tl.uint64)
    for begin in range(0, found, PART):
        other = pool_part(pool, begin, found, PART)
        each = tl.where(other >= cut, weight(_value_or_nothing(other), peak), 0)
        passed += tl.sum(tl.where(id_in(other)[None, :] <= ids[:, None], each[None, :], 0), 1)
    hit = (rank < stay) & (passed > target) & (passed - w <= target)
    return tl.max(tl.where(hit, ids, 0), 0), cut, by_rank | (have >= limit)


@jit
def _draw_from_many(
    pool: tl.tensor,
    found: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    vocab: int,
    peak: tl.tensor,
    total: tl.tensor,
    bits: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return what `_draw_from_few` returns, by sorting the candidates."""
    lane = tl.arange(0, WIDTH)
    entries = best_of_pool(pool, found, WIDTH)
    by_rank = _by_rank(top_k, vocab)
    last = tl.where(by_rank, tl.minimum(top_k, found), found)
    w = weight(tl.where(lane < last, value_of(key_in(entries)), float("-inf")), peak)
    reached = tl.cumsum(w, 0)
    have = tl.sum(w, 0)
    limit = _limit(top_p, tl.where(by_rank, have, total))
    nucleus = tl.sum(((reached - w < limit) & (lane < last)).to(tl.int32), 0)
    stay = tl.where(top_p < 1.0, tl.minimum(last, nucleus), last)
    cut = tl.max(tl.where(lane == stay - 1, entries, 0), 0)
    w = tl.where(lane < stay, w, 0)
    target = tl.umulhi(bits << 11, tl.sum(w, 0))
    by_id = (id_in(entries).to(tl.uint64) << WEIGHT_BITS) | w
    by_id = tl.sort(tl.where(lane < stay, by_id, 0xFFFFFFFFFFFFFFFF))
    passed = tl.cumsum(tl.where(lane < stay, by_id & WEIGHT_MASK, 0), 0)
    at = tl.sum(((passed <= target) & (lane < stay)).to(tl.int32), 0)
    token = tl.max(tl.where(lane == at, by_id >> WEIGHT_BITS, 0), 0).to(tl.int32)
    return token, cut, by_rank | (have >= limit)


@jit
def _draw_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,
    counters: tl.tensor,
    pool: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    status: tl.tensor,
    cut_keys: tl.tensor,
    cut_ids: tl.tensor,
    pending: tl.tensor,
    count: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    PART: tl.constexpr,
    POOL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    tl.store(pending + row, 0)
    if (temperature > 0) & (tl.load(status + row) == 0):
        top_k, top_p, peak = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(peaks + row)
        bits = random_bits(tl.load(seeds + row), tl.load(positions + row))
        part = _blocks_weights(sums + row * count, count, top_k, vocab, WIDTH)
        total = tl.sum(part, 0)
        if _reads_pool(top_k, top_p, vocab):
            found = tl.load(counters + row)
            token, cut, enough = tl.full([], 0, tl.int32), tl.full([], 0, tl.uint64), found < 0
            if found <= SHORT:
                mine = pool + row.to(tl.int64) * POOL
                token, cut, enough = _draw_from_few(mine, found, top_k, top_p, vocab, peak, total, bits, SHORT, PART)
            if enough:
                tl.store(tokens + row, token)
                tl.store(cut_keys + row, key_in(cut).to(tl.int64))
                tl.store(cut_ids + row, id_in(cut))
            else:
                tl.store(pending + row, 1)
        else:
            floor = tl.load(cut_keys + row).to(tl.uint32)
            target = tl.umulhi(bits << 11, total)
            start = logits + row.to(tl.int64) * stride
            token = _draw_from_blocks(start, vocab, temperature, floor, peak, part, target, BLOCK)
            tl.store(tokens + row, token)


@jit
def _by_fours(w: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return [BLOCK / 4] sums of four neighbours, which one thread has."""
    return tl.sum(tl.reshape(w, [BLOCK // 4, 4]), 1)


@jit
def _weight_from(
    row: tl.tensor, vocab: int, temperature: tl.tensor, peak: tl.tensor, least: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the weight of all tokens with keys of at least ``least``."""
    total = tl.zeros([BLOCK // 4], tl.uint64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        s = score(tl.load(row + ids, mask=ids < vocab, other=float("-inf")), temperature)
        total += _by_fours(tl.where(ordered_key(s) >= least, weight(s, peak), 0), BLOCK)
    return tl.sum(total, 0)


@jit
def _key_at_weight(
    row: tl.tensor, vocab: int, temperature: tl.tensor, peak: tl.tensor, limit: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the largest key such that tokens of at least that key weigh ``limit`` or more: two bits a pass."""
    found = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        first, second = tl.zeros([BLOCK // 4], tl.uint64), tl.zeros([BLOCK // 4], tl.uint64)
        third = tl.zeros([BLOCK // 4], tl.uint64)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            s = score(tl.load(row + ids, mask=ids < vocab, other=float("-inf")), temperature)
            key, w = ordered_key(s), weight(s, peak)
            first += _by_fours(tl.where(key >= found + unit, w, 0), BLOCK)
            second += _by_fours(tl.where(key >= found + 2 * unit, w, 0), BLOCK)
            third += _by_fours(tl.where(key >= found + 3 * unit, w, 0), BLOCK)
        steps = (tl.sum(first, 0) >= limit).to(tl.uint32) + (tl.sum(second, 0) >= limit).to(tl.uint32)
        found += unit * (steps + (tl.sum(third, 0) >= limit).to(tl.uint32))
        unit = unit >> 2
    return found


@jit
def _walk(
    row: tl.tensor,
    vocab: int,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    cut: tl.tensor,
    peak: tl.tensor,
    bits: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Cut off and draw by passes over the whole row, whatever it holds; return the token, the cut's key and its id.

    Args:
        row: pointer to [vocab] logits.
        cut: the key that min_p leaves.
    """
    quota = tl.full([], vocab, tl.int64)
    if _by_rank(top_k, vocab):
        cut, stay = nth_key(row, vocab, temperature, cut, top_k, BLOCK)
        quota = stay.to(tl.int64)
    above = _weight_from(row, vocab, temperature, peak, cut + 1, BLOCK)
    if _by_rank(top_k, vocab):
        total = above + quota.to(tl.uint64) * weight(value_of(cut), peak)
    else:
        total = _weight_from(row, vocab, temperature, peak, cut, BLOCK)
    if top_p < 1.0:
        limit = _limit(top_p, total)
        edge = _key_at_weight(row, vocab, temperature, peak, limit, BLOCK)
        above = _weight_from(row, vocab, temperature, peak, edge + 1, BLOCK)
        each = weight(value_of(edge), peak)
        needed = ((limit - above + each - 1) // each).to(tl.int64)
        quota = tl.where(edge == cut, tl.minimum(quota, needed), needed)
        cut = edge
    total = above + quota.to(tl.uint64) * weight(value_of(cut), peak)
    cut_id = nth_equal(row, vocab, temperature, cut, quota, BLOCK)
    target = tl.umulhi(bits << 11, total)
    passed, token = tl.full([], 0, tl.uint64), tl.full([], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        s = score(tl.load(row + ids, mask=ids < vocab, other=float("-inf")), temperature)
        key = ordered_key(s)
        w = tl.where((key > cut) | ((key == cut) & (ids <= cut_id)), weight(s, peak), 0)
        here = tl.sum(w, 0)
        if (token < 0) & (passed + here > target):
            token = start + tl.sum((passed + tl.cumsum(w, 0) <= target).to(tl.int32), 0)
        passed += here
    return token, cut, cut_id


@jit
def _settle_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,
    counters: tl.tensor,
    pool: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    status: tl.tensor,
    cut_keys: tl.tensor,
    cut_ids: tl.tensor,
    pending: tl.tensor,
    count: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL: tl.constexpr,
) -> None:
    """Draw for rows with many candidates: sort them, or where they are too many, walk over the row."""
    line = tl.program_id(0)
    if (tl.load(pending + line) != 0) & (tl.load(status + line) == 0):
        temperature, peak = tl.load(temperatures + line), tl.load(peaks + line)
        top_k, top_p = tl.load(top_ks + line), tl.load(top_ps + line)
        bits = random_bits(tl.load(seeds + line), tl.load(positions + line))
        found, enough = tl.load(counters + line), tl.full([], 0, tl.int1)
        token, cut = tl.full([], 0, tl.int32), tl.full([], 0, tl.uint64)
        if found <= POOL:
            total = tl.sum(_blocks_weights(sums + line * count, count, top_k, vocab, WIDTH), 0)
            mine = pool + line.to(tl.int64) * POOL
            token, cut, enough = _draw_from_many(mine, found, top_k, top_p, vocab, peak, total, bits, POOL)
        key, last = key_in(cut), id_in(cut)
        if not enough:
            floor = tl.load(cut_keys + line).to(tl.uint32)
            row = logits + line.to(tl.int64) * stride
            token, key, last = _walk(row, vocab, temperature, top_k, top_p, floor, peak, bits, BLOCK)
        tl.store(tokens + line, token)
        tl.store(cut_keys + line, key.to(tl.int64))
        tl.store(cut_ids + line, last)


def sample(
    logits: Tensor,
    temperature: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Sampled:
    """Return a token for each row.

    Args:
        logits: [R, V] float32, after masks, bias and penalties.
        temperature: [R] float32, 0 is greedy.
        log_min_p: [R] float32, natural logarithm of min_p, -inf is off.
        top_k: [R] int32, 0 or V and more is off.
        top_p: [R] float32, 1 is off.
        seeds: [R] int64, the bits of the 64-bit unsigned seeds.
        positions: [R] int64, absolute position of the token that is sampled.
    """
    rows, _ = check_logits(logits)
    numbers = {"temperature": temperature, "log_min_p": log_min_p, "top_p": top_p}
    check_columns(rows, logits.device, **{name: (column, torch.float32) for name, column in numbers.items()})
    check_columns(rows, logits.device, top_k=(top_k, torch.int32), seeds=(seeds, torch.int64))
    check_columns(rows, logits.device, positions=(positions, torch.int64))
    return _launch(logits, temperature, log_min_p, top_k, top_p, seeds, positions)


def _launch(
    x: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Sampled:
    rows, vocab, count, device = *x.shape, blocks(x.shape[1]), x.device
    groups = padded(count * (BLOCK // GROUP))
    bests, sums, pool = longs(device, rows, count), longs(device, rows, count), longs(device, rows, POOL)
    tops, peaks, listed = floats(device, rows, groups), floats(device, rows), ints(device, rows, POOL)
    flags, counters, pending = ints(device, rows, count), ints(device, rows), ints(device, rows)
    out = Sampled(ints(device, rows), ints(device, rows), longs(device, rows), ints(device, rows))
    start, cut, drawn = (x, x.stride(0), vocab), (temperature, top_k, top_p), (seeds, positions)
    every, lines = (rows, count), (rows,)

    _peaks_kernel[every](*start, *cut, bests, flags, tops, groups, BLOCK=BLOCK, GROUP=GROUP, **settings("pass"))
    found = (log_min_p, bests, flags, tops, groups, *out, peaks, counters, listed, pool, count)
    sizes = {"WIDTH": MAX_BLOCKS, "TOPS": groups, "GROUP": GROUP, "LINES": LINES, "POOL": POOL}
    _bounds_kernel[lines](*start, *cut, *found, **sizes, **settings("combine"))
    bounds = (temperature, top_k, out.status, out.cut_keys, peaks, sums, count)
    _weights_kernel[rows, programs(rows, count)](*start, *bounds, BLOCK=BLOCK, **settings("pass"))
    left, sizes = (*drawn, peaks, counters, pool, sums, *out, pending, count), {"WIDTH": MAX_BLOCKS, "POOL": POOL}
    _draw_kernel[lines](*start, *cut, *left, **sizes, BLOCK=BLOCK, SHORT=SHORT, PART=PART, **settings("compare"))
    _settle_kernel[lines](*start, *cut, *left, **sizes, BLOCK=STRIDE, **settings("walk"))
    return out
