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
def least_of_groups(tops: tl.tensor, groups: tl.tensor, n: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return a key that at least n of the groups' largest reach: the n-th largest without its last byte.

    Args:
        tops: pointer to [groups] float32.
        n: at most ``groups``.
    """
    lane = tl.arange(0, WIDTH)
    keys = ordered_key(tl.load(tops + lane, mask=lane < groups, other=float("-inf")))
    least = tl.full([], 0, tl.uint32)
    for step in tl.static_range(3):
        digit = (keys >> (24 - 8 * step)) & 255
        live = (keys >> 8) >> (24 - 8 * step) == least
        counts = tl.histogram(digit.to(tl.int32), 256, mask=live)
        byte, n = pick_digit(counts, n)
        least = (least << 8) | byte.to(tl.uint32)
    return least << 8


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
def pool_put(
    key: tl.tensor, ids: tl.tensor, chosen: tl.tensor, counter: tl.tensor, pool: tl.tensor, POOL: tl.constexpr
) -> None:
    """Append the chosen tokens to a row's pool as far as it reaches; the counter tells how many there were.

    They come in any order: what is read from the pool is sorted, and entries are all different.
    """
    place = tl.atomic_add(counter + ids * 0, 1, mask=chosen, sem="relaxed")
    entries = packed(key, ids).to(tl.int64, bitcast=True)
    tl.store(pool + place, entries, mask=chosen & (place < POOL))


@jit
def compared(pool: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] entries of a row's pool as they are, 0 behind the last, and [i, j] whether entry j is before i.

    For a few entries, comparing every two is faster than sorting them.
    """
    lane = tl.arange(0, WIDTH)
    entries = tl.load(pool + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)
    return entries, entries[None, :] > entries[:, None]


@jit
def best_of_pool(pool: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return [WIDTH] entries of a row's pool, the best first; 0 behind the last."""
    lane = tl.arange(0, WIDTH)
    entries = tl.load(pool + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)
    return tl.sort(entries, descending=True)


@jit
def floor_key(peak: tl.tensor, log_min_p: tl.tensor) -> tl.tensor:
    """Return the least key that min_p leaves: of peak + log min_p, or of the lowest finite number."""
    return tl.maximum(ordered_key(peak + log_min_p), LOWEST_KEY)
