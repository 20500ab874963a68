"""Rule out a row's stop ids while it is shorter than its minimum: both from the row state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import check_logits, varying
from slotline.kernels.ordering import ruled_out
from slotline.kernels.row_layout import DEAD, MAX_STOPS, MIN_LEN, STOP_IDS, STOPS

LINES = 32  # rows a program


@varying("count")
def _hold_kernel(
    logits: tl.tensor,
    logits_stride: int,
    vocab: int,
    state: tl.tensor,
    stride: int,
    slots: tl.tensor,
    following: tl.tensor,
    count: int,
    LINES: tl.constexpr,
) -> None:
    lane = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = lane < count
    row = state + tl.load(slots + lane, mask=inside, other=0).to(tl.int64) * stride
    alive = tl.load(row + DEAD, mask=inside, other=1) == 0
    position = tl.load(following + lane, mask=inside, other=0)
    held = inside & alive & (position < tl.load(row + MIN_LEN, mask=inside, other=0))
    entry = tl.arange(0, MAX_STOPS)
    listed = entry[None, :] < tl.load(row + STOPS, mask=held, other=0)[:, None]  # [LINES, MAX_STOPS]
    listed = listed & held[:, None]
    stop_id = tl.load((row + STOP_IDS)[:, None] + entry[None, :], mask=listed, other=-1)
    listed = listed & (stop_id >= 0) & (stop_id < vocab)
    place = logits + lane.to(tl.int64)[:, None] * logits_stride + stop_id
    x = tl.load(place, mask=listed, other=0.0)
    tl.store(place, ruled_out(x), mask=listed)


def hold_stops(logits: Tensor, state: Tensor, slots: Tensor, following: Tensor) -> None:
    """Rule ids out in place.

    Args:
        logits: [R, V] float32.
        state: [S, W] int32, see `row_layout`.
        slots: [R] int32, each row's line.
        following: [R] int32, absolute position of the token that is sampled.
    """
    count, vocab = check_logits(logits)
    args = (logits, logits.stride(0), vocab, state, state.stride(0), slots, following, count)
    _hold_kernel[(triton.cdiv(count, LINES),)](*args, LINES=LINES, num_warps=4)
