"""One uniform number a row from Philox4x32-10, in 64-bit integers."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def random_bits(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [R] int64 of 53 random bits."""
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    c0, c1 = positions & _LOW, (positions >> 32) & _LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high2, low2 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return (c0 << 21) | (c1 >> 11)


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product of two 32-bit numbers; an int64 would overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)  # 48 bits each
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [R] float64 in [0, 1) for int64 seeds and positions [R]."""
    return random_bits(seeds, positions).to(torch.float64) * 2.0**-53
