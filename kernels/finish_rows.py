"""Take note of what rows sampled: their last token, and whether they end with it.

A row ends where its token is one of its stop ids, from its minimum length on, and where it had no finite logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import ints, varying
from slotline.kernels.row_layout import (
    DEAD,
    LAST,
    MAX_STOPS,
    MIN_LEN,
    ROW_DEAD,
    ROW_NOT_FINITE,
    ROW_OK,
    ROW_STOPPED,
    STOP_IDS,
    STOPS,
)

LINES = 32  # rows a program


@varying("count")
def _finish_kernel(
    state: tl.tensor,
    stride: int,
    slots: tl.tensor,
    following: tl.tensor,
    tokens: tl.tensor,
    found: tl.tensor,
    status: tl.tensor,
    count: int,
    LINES: tl.constexpr,
) -> None:
    lane = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = lane < count
    row = state + tl.load(slots + lane, mask=inside, other=0).to(tl.int64) * stride
    alive = tl.load(row + DEAD, mask=inside, other=1) == 0
    bad = tl.load(found + lane, mask=inside, other=0) != 0
    token = tl.load(tokens + lane, mask=inside, other=0)
    entry = tl.arange(0, MAX_STOPS)
    listed = entry[None, :] < tl.load(row + STOPS, mask=inside, other=0)[:, None]  # [LINES, MAX_STOPS]
    stop_id = tl.load((row + STOP_IDS)[:, None] + entry[None, :], mask=inside[:, None] & listed, other=-1)
    matches = tl.max(((stop_id == token[:, None]) & listed).to(tl.int32), 1) != 0
    position = tl.load(following + lane, mask=inside, other=0)
    stops = matches & (position >= tl.load(row + MIN_LEN, mask=inside, other=0))
    outcome = tl.where(bad, ROW_NOT_FINITE, tl.where(stops, ROW_STOPPED, ROW_OK))
    outcome = tl.where(alive, outcome, ROW_DEAD)
    tl.store(status + lane, outcome, mask=inside)
    tl.store(row + LAST, token, mask=inside & alive)
    tl.store(row + DEAD, tl.full([LINES], 1, tl.int32), mask=inside & (outcome != ROW_OK))


def finish_rows(state: Tensor, slots: Tensor, following: Tensor, tokens: Tensor, found: Tensor) -> Tensor:
    """Return [R] int32 how each row came out (see `row_layout`), and change the row state in place.

    Args:
        state: [S, W] int32.
        slots: [R] int32, each row's line; those of padding rows may repeat.
        following: [R] int32, absolute position of the token.
        tokens: [R] int32.
        found: [R] int32, status of the draw, 0 is good.
    """
    count = len(slots)
    status = ints(state.device, count)
    args = (state, state.stride(0), slots, following, tokens, found, status, count)
    _finish_kernel[(triton.cdiv(count, LINES),)](*args, LINES=LINES, num_warps=4)
    return status
