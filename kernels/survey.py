"""What one pass over the logits finds out of each block of a row: its best token, whether a logit is invalid, the sum
of exponentials, and the largest of every group.

Drawing and logprobs both begin with it. A step that does both lends the pass of `sample` to `top_logprobs`; since the
kernel is one, a request's logprobs have the same bits either way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, GROUP, blocks, floats, ints, jit, longs, padded, settings
from slotline.kernels.logsumexp import block_sum
from slotline.kernels.ordering import invalid, ordered_key, packed
from slotline.kernels.selection import reads_pool


class Survey(NamedTuple):
    """Of the blocks of L lines, each a row of logits.

    Attributes:
        asks: [L] int32, negative in lines whose sums nobody asks for; None if that is all of them.
        bests: [L, blocks] int64, the best token's key and id, packed.
        flags: [L, blocks] int32, whether a logit is NaN or +inf.
        sums: [L, blocks] float32, the sum of exp(x - largest), in lines that ask.
        tops: [L, groups] float32, the largest of each group, in lines that ask or are drawn from candidates; groups
            fill up to a power of two.
    """

    asks: Tensor | None
    bests: Tensor
    flags: Tensor
    sums: Tensor
    tops: Tensor

    @classmethod
    def of(cls, lines: int, vocab: int, device: torch.device, asks: Tensor | None = None) -> Survey:
        """Return room for one."""
        count = blocks(vocab)
        parts = longs(device, lines, count), ints(device, lines, count), floats(device, lines, count)
        return cls(asks, *parts, floats(device, lines, padded(count * (BLOCK // GROUP))))


@jit
def _survey_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    asks: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    bests: tl.tensor,
    flags: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    tops_stride: int,
    DRAWS: tl.constexpr,
    TELLS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    line, block = tl.program_id(0), tl.program_id(1)
    asked = tl.full([], -1, tl.int32)
    if TELLS:
        asked = tl.load(asks + line)
    row, grouped = asked, asked >= 0
    if DRAWS:
        row = line
        drawn = (tl.load(temperatures + line) > 0) & reads_pool(tl.load(top_ks + line), tl.load(top_ps + line), vocab)
        grouped = grouped | drawn
    if row >= 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
        place, wrong = line * tl.num_programs(1) + block, invalid(x)
        # Logits, not scores: what is largest stays so when all are divided by a temperature.
        tl.store(bests + place, tl.max(packed(ordered_key(x), ids), 0).to(tl.int64, bitcast=True))
        tl.store(flags + place, tl.max(wrong.to(tl.int32), 0))
        if asked >= 0:
            _, total = block_sum(tl.where(wrong, float("-inf"), x))
            tl.store(sums + place, total)
        if grouped:
            largest = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
            lane = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(tops + line.to(tl.int64) * tops_stride + lane, largest)


def take(logits: Tensor, survey: Survey, draws: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    """Fill in a survey.

    Args:
        logits: [R, V] float32.
        draws: temperature, top_k and top_p of each row, if all rows are drawn from; lines are rows then, otherwise
            those that ``asks`` names.
    """
    lines, count = survey.bests.shape
    columns = draws or (survey.flags,) * 3  # of those that are not read any will do
    asks = survey.flags if survey.asks is None else survey.asks
    _survey_kernel[(lines, count)](
        logits, logits.stride(0), logits.shape[1], asks, *columns, *survey[1:], survey.tops.shape[1],
        DRAWS=draws is not None, TELLS=survey.asks is not None, BLOCK=BLOCK, GROUP=GROUP, **settings("pass"),
    )  # fmt: skip
