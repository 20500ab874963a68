"""What one pass over a row finds out about each of its blocks: the sum of exponentials, and the best of small groups.

`sample` has that pass, and lends it to `top_logprobs`, which would read the logits once more for the same.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from slotline.kernels.launch import blocks, floats, group_lanes, ints


class Survey(NamedTuple):
    """Of the blocks of R rows; but for the flags, only rows that ask are written.

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
