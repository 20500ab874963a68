"""Philox4x32-10, the counter-based generator of Random123, vectorised over rows.

A draw depends on the row's seed and on the position of the token, on nothing else: the same
request gives the same tokens in any company, chunked or whole, before and after a preemption.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

PURPOSE_DRAW = 0  # the counter's third word; another use of the same seed and position takes another number


def philox4x32(counter: UIntArray, key: UIntArray) -> UIntArray:
    """Return [..., 4] random words for counters [..., 4] under keys [..., 2]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint32) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        first = c0.astype(np.uint64) * _MULTIPLIERS[0]
        second = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(second) ^ c1 ^ _low(k0), _low(second), _high(first) ^ c3 ^ _low(k1), _low(first)
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]  # 64 bits wide, of which only the lower half is used
    return np.stack([c0, c1, c2, c3], axis=-1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return [R] numbers in [0, 1), one per row, with 53 random bits each.

    Args:
        seeds: [R] the rows' seeds, the generator's key.
        positions: [R] absolute position of the token being sampled, the generator's counter.
    """
    place = positions.astype(np.uint64)
    zeros = np.zeros_like(place)
    counter = np.stack([place & _LOW, place >> _SHIFT, zeros + np.uint64(PURPOSE_DRAW), zeros], axis=-1)
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=-1)
    words = philox4x32(counter.astype(np.uint32), key.astype(np.uint32)).astype(np.uint64)  # [R, 4]
    bits = (words[..., 0] << np.uint64(21)) | (words[..., 1] >> np.uint64(11))
    drawn: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return drawn


def _high(product: npt.NDArray[np.uint64]) -> UIntArray:
    return (product >> _SHIFT).astype(np.uint32)


def _low(product: npt.NDArray[np.uint64]) -> UIntArray:
    return (product & _LOW).astype(np.uint32)
