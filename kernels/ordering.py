"""Device functions on single numbers: ordered keys, scores, weights.

The key of a float32 is its bits as an unsigned integer, the sign bit flipped for positive numbers and all bits for
negative ones, so that integers compare as the numbers do (M. Herf, "Radix Tricks", 2001). Both zeros share a key.

The weight of a score s in a row whose largest is m is the integer floor(2**44 exp(s - m)). Sums of weights are exact in
any order, in 64 bits up to 2**19 of them: so the split of a row into programs cannot change what is kept or drawn.
"""

from __future__ import annotations

import triton.language as tl

from slotline.kernels.launch import jit

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LOWEST_KEY = tl.constexpr(0x00800000)  # of the lowest finite number; -inf and below are smaller
SCALE = tl.constexpr(17592186044416.0)  # 2**44
WEIGHT_BITS = tl.constexpr(45)
WEIGHT_MASK = tl.constexpr((1 << 45) - 1)
LOW_WORD = tl.constexpr(0xFFFFFFFF)


@jit
def ordered_key(x: tl.tensor) -> tl.tensor:
    """Return the uint32 key of a float32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@jit
def value_of(key: tl.tensor) -> tl.tensor:
    """Return the float32 that has the key."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, ~key)
    return bits.to(tl.float32, bitcast=True)


@jit
def invalid(x: tl.tensor) -> tl.tensor:
    """Return whether a logit is NaN or +inf."""
    return (x != x) | (x == float("inf"))  # noqa: PLR0124 - only NaN differs from itself


@jit
def ruled_out(x: tl.tensor) -> tl.tensor:
    """Return -inf, but leave what is invalid as it is, so that a mask does not hide that the row came out wrong."""
    return tl.where(invalid(x), x, float("-inf"))


@jit
def score(x: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return x / temperature, correctly rounded, at most the largest finite number; x itself at temperature 0."""
    if (temperature > 0) & (temperature != 1.0):
        x = tl.div_rn(x, tl.broadcast_to(temperature, x.shape))
    return tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def weight(s: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Return floor(2**44 exp(s - peak)) as uint64."""
    return (tl.exp(s - peak) * SCALE).to(tl.int64).to(tl.uint64)


@jit
def packed(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Return key and id in one uint64: falling order is falling by key, then rising by id."""
    return (key.to(tl.uint64) << 32) | (ids.to(tl.uint64) ^ LOW_WORD)


@jit
def key_in(entry: tl.tensor) -> tl.tensor:
    """Return the key of a packed entry."""
    return (entry >> 32).to(tl.uint32)


@jit
def id_in(entry: tl.tensor) -> tl.tensor:
    """Return the id of a packed entry."""
    return ((entry & LOW_WORD) ^ LOW_WORD).to(tl.int32)
