"""One uniform number a row from Philox4x32-10: key = the row's seed, counter = (position, purpose 0).

    (c0, c1, c2, c3) <- (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0))
    (k0, k1) <- (k0 + 0x9E3779B9, k1 + 0xBB67AE85)

ten times over, with A = 0xD2511F53 and B = 0xCD9E8D57 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). The first 53 bits of the result, c0 then c1, are the number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import LIST, check_columns, jit, settings, varying

_A = tl.constexpr(0xD2511F53)
_B = tl.constexpr(0xCD9E8D57)
_STEP0 = tl.constexpr(0x9E3779B9)
_STEP1 = tl.constexpr(0xBB67AE85)
_UNIT = tl.constexpr(2.0**-53)


@jit
def random_bits(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return 53 random bits as uint64 for int64 seeds and positions of the same shape."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = c0 & 0, c0 & 0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, c0 * 0 + _A), c0 * _A
        high2, low2 = tl.umulhi(c2, c0 * 0 + _B), c2 * _B
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _STEP0, k1 + _STEP1
    return (c0.to(tl.uint64) << 21) | (c1.to(tl.uint64) >> 11)


@varying("count")
def _uniform_kernel(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, count: int, WIDTH: tl.constexpr) -> None:
    lines = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = lines < count
    seed, position = tl.load(seeds + lines, mask=inside, other=0), tl.load(positions + lines, mask=inside, other=0)
    bits = random_bits(seed, position)
    tl.store(out + lines, bits.to(tl.float64) * _UNIT, mask=inside)


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [R] float64 in [0, 1).

    Args:
        seeds: [R] int64, the bits of the 64-bit unsigned seeds.
        positions: [R] int64, absolute position of the token that is sampled.
    """
    count, device = len(seeds), seeds.device
    check_columns(count, device, seeds=(seeds, torch.int64), positions=(positions, torch.int64))
    out = torch.empty(count, dtype=torch.float64, device=device)
    _uniform_kernel[(triton.cdiv(count, LIST),)](seeds, positions, out, count, WIDTH=LIST, **settings("list"))
    return out
