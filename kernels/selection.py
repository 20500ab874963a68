"""Device functions that find the best of a row without sorting it.

Two ideas. **Groups**: cut the row into groups of GROUP ids; at least n tokens are as good as the n-th best of the
groups' largest, so whatever is below that is not among the n best; a few more than n pass, and only those are sorted.
**Digits**: the n-th largest of any set of 32-bit keys comes out exactly from one histogram for each of their four
bytes, highest first (radix selection; Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012).
Groups are for speed; where they do not narrow a row down to POOL candidates, digits settle it.
"""

from __future__ import annotations

import triton.language as tl

from slotline.kernels.launch import jit
from slotline.kernels.ordering import LOWEST_KEY, ordered_key, packed, score


@jit
def pick_digit(counts: tl.tensor, n: tl.tensor) -> tl.tensor:
    """Return the largest byte d such that bytes from d on were counted n times or more, and n less those above d."""
    digits = tl.arange(0, 256)
    at_least = tl.cumsum(counts, 0, reverse=True)
    digit = tl.max(tl.where(at_least >= n, digits, 0), 0)
    return digit, n - tl.sum(tl.where(digits > digit, counts, 0), 0)


@jit
def keys_of_groups(tops: tl.tensor, groups: tl.tensor, temperature: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] the keys of what the groups' largest score; those behind the last group are of nothing.

    Args:
        tops: pointer to [groups] float32.
    """
    lane = tl.arange(0, WIDTH)
    x = tl.load(tops + lane, mask=lane < groups, other=float("-inf"))
    return ordered_key(score(x, temperature))


@jit
def reached_by(keys: tl.tensor, n: tl.tensor) -> tl.tensor:
    """Return a key that at least n of [WIDTH] keys reach, and hardly more: n / 16 + 4 at most, unless keys are equal.

    Halves the range until that holds, which takes about ten counts; an exact n-th would take thirty.

    Args:
        n: at most how many of the keys are of something.
    """
    high = tl.max(keys, 0)
    low = tl.min(tl.where(keys >= LOWEST_KEY, keys, high), 0)
    count = tl.sum((keys >= low).to(tl.int32), 0)
    low = tl.where(count >= n, low, LOWEST_KEY)  # fewer are finite: all of them are wanted
    while (count > n + n // 16 + 4) & (low < high):
        middle = high - (high - low) // 2
        reach = tl.sum((keys >= middle).to(tl.int32), 0)
        enough = reach >= n
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle - 1)
    return low


@jit
def gather_groups(
    row: tl.tensor,
    vocab: int,
    temperature: tl.tensor,
    keys: tl.tensor,
    least: tl.tensor,
    listed: tl.tensor,
    pool: tl.tensor,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    POOL: tl.constexpr,
) -> tl.tensor:
    """Put a row's tokens whose key is at least ``least`` into its pool; return how many there are, or more than POOL.

    Only groups with such a token are read. They come in the order of their ids.

    Args:
        row: pointer to [vocab] logits.
        keys: [groups and more] of the groups' largest, see `keys_of_groups`.
        listed: pointer to [POOL] int32, scratch.
        pool: pointer to [POOL] int64, packed entries.
    """
    chosen = keys >= least
    nth = tl.cumsum(chosen.to(tl.int32), 0) - 1
    groups = tl.sum(chosen.to(tl.int32), 0)
    tl.store(listed + nth, tl.arange(0, keys.shape[0]), mask=chosen & (nth < POOL))
    tl.debug_barrier()  # other threads read the list than wrote it
    found = tl.where(groups > POOL, POOL + 1, 0)
    for at in range(0, tl.where(groups > POOL, 0, groups), LINES):
        line = at + tl.arange(0, LINES)
        group = tl.load(listed + line, mask=line < groups, other=0)
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [LINES, GROUP]
        x = tl.load(row + ids, mask=(line < groups)[:, None] & (ids < vocab), other=float("-inf"))
        key = ordered_key(score(x, temperature))
        taken = tl.reshape((key >= least).to(tl.int32), [LINES * GROUP])
        entries = tl.reshape(packed(key, ids), [LINES * GROUP]).to(tl.int64, bitcast=True)
        place = found + tl.cumsum(taken, 0) - 1
        tl.store(pool + place, entries, mask=(taken != 0) & (place < POOL))
        found += tl.sum(taken, 0)
    return found


@jit
def gather_best(
    row: tl.tensor,
    vocab: int,
    temperature: tl.tensor,
    tops: tl.tensor,
    n: tl.tensor,
    floor: tl.tensor,
    listed: tl.tensor,
    pool: tl.tensor,
    TOPS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    POOL: tl.constexpr,
) -> tl.tensor:
    """Put at least the best n of a row, as far as they reach ``floor``, into its pool; return as `gather_groups` does.

    Args:
        tops: pointer to the largest logit of each group, see `keys_of_groups`; the rest is as in `gather_groups`.
        floor: the least key that counts, at least LOWEST_KEY.
    """
    groups = (vocab + GROUP - 1) // GROUP
    keys = keys_of_groups(tops, groups, temperature, TOPS)
    if (vocab > POOL) & (n <= groups):
        floor = tl.maximum(floor, reached_by(keys, n))
    return gather_groups(row, vocab, temperature, keys, floor, listed, pool, GROUP, LINES, POOL)


@jit
def nth_key(
    row: tl.tensor, vocab: int, temperature: tl.tensor, floor: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the n-th largest key of a row, and how many of those with that key are among the n best.

    Args:
        row: pointer to [vocab] logits.
        floor: the least key that counts, at least LOWEST_KEY; where fewer than n count, all of them are the best.
    """
    found = tl.full([], 0, tl.uint32)
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
            key = ordered_key(score(x, temperature))
            live = (key >= floor) & ((key >> 8) >> (24 - 8 * step) == found)
            counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=live)
        if step == 0:
            n = tl.minimum(n, tl.sum(counts, 0))
        byte, n = pick_digit(counts, n)
        found = (found << 8) | byte.to(tl.uint32)
    return found, n


@jit
def nth_equal(
    row: tl.tensor, vocab: int, temperature: tl.tensor, key: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the id of the n-th token of a row that has the key, counting from 1."""
    seen = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        equal = (ordered_key(score(x, temperature)) == key).to(tl.int64)
        here = tl.sum(equal, 0)
        if (seen < n) & (seen + here >= n):
            at = seen + tl.cumsum(equal, 0)
            found = tl.max(tl.where((equal != 0) & (at == n), ids, 0), 0)
        seen += here
    return found


@jit
def pool_part(pool: tl.tensor, begin: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] entries of a row's pool as they are, 0 behind the last."""
    lane = begin + tl.arange(0, WIDTH)
    return tl.load(pool + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)


@jit
def ranks_in_pool(entries: tl.tensor, pool: tl.tensor, count: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Return how many of a row's pool are larger than each entry; where they are few, it is faster than sorting."""
    rank = tl.zeros(entries.shape, tl.int32)
    for begin in range(0, count, PART):
        other = pool_part(pool, begin, count, PART)
        rank += tl.sum((other[None, :] > entries[:, None]).to(tl.int32), 1)
    return rank


@jit
def best_of_pool(pool: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] entries of a row's pool, the best first; 0 behind the last."""
    return tl.sort(pool_part(pool, 0, count, WIDTH), descending=True)


@jit
def floor_key(peak: tl.tensor, log_min_p: tl.tensor) -> tl.tensor:
    """Return the least key that min_p leaves: of peak + log min_p, or of the lowest finite number."""
    return tl.maximum(ordered_key(peak + log_min_p), LOWEST_KEY)
