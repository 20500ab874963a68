"""What one pass over a row finds out about each of its blocks: the sum of exponentials, and the best of small groups.

`sample` has that pass, and lends it to `top_logprobs`, which would read the logits once more for the same.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, GROUP, blocks, floats, ints, jit, padded
from slotline.kernels.logsumexp import block_sum
from slotline.kernels.ordering import invalid, ordered_key


class Survey(NamedTuple):
    """Of the blocks of R rows; only rows that ask are written.

    Attributes:
        asks: [R] int32, negative in rows that do not ask.
        peaks, sums: [R, blocks] float32, a block's largest logit, and the sum of exp(x - largest).
        flags: [R, blocks] int32, whether one of them is NaN or +inf.
        tops: [R, groups] float32, the largest of each group, -inf behind the last; groups fill up to a power of two.
    """

    asks: Tensor
    peaks: Tensor
    sums: Tensor
    flags: Tensor
    tops: Tensor

    @classmethod
    def of(cls, asks: Tensor, vocab: int) -> Survey:
        """Return room for one of logits [R, vocab]."""
        rows, count, device = len(asks), blocks(vocab), asks.device
        parts = floats(device, rows, count), floats(device, rows, count), ints(device, rows, count)
        return cls(asks, *parts, floats(device, rows, group_lanes(vocab)))


def group_lanes(vocab: int) -> int:
    """Return how many groups the blocks of a row have, up to a power of two."""
    return padded(blocks(vocab) * (BLOCK // GROUP))


@jit
def survey_block(
    x: tl.tensor,
    line: tl.tensor,
    block: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    flags: tl.tensor,
) -> tl.tensor:
    """Note what a block of logits adds up to; return it with -inf for what is invalid."""
    wrong = invalid(x)
    x = tl.where(wrong, float("-inf"), x)
    peak, total = block_sum(x)
    place = line * tl.num_programs(1) + block
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)
    tl.store(flags + place, tl.max(wrong.to(tl.int32), 0))
    return x


@jit
def note_groups(
    x: tl.tensor,
    line: tl.tensor,
    block: tl.tensor,
    tops: tl.tensor,
    stride: int,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Note the largest of each group of a block."""
    largest = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
    lane = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(tops + line.to(tl.int64) * stride + lane, largest)


@jit
def groups_from(
    line: tl.tensor,
    block: tl.tensor,
    tops: tl.tensor,
    stride: int,
    least: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Return [groups of the block] whether a group has a key of at least ``least``."""
    lane = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    return ordered_key(tl.load(tops + line.to(tl.int64) * stride + lane)) >= least


@jit
def ids_of_groups(block: tl.tensor, BLOCK: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Return [groups, GROUP] the ids of a block."""
    group, lane = tl.arange(0, BLOCK // GROUP), tl.arange(0, GROUP)
    return block * BLOCK + group[:, None] * GROUP + lane[None, :]
