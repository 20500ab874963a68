"""Look up how rows sample: the columns that `sample` and `top_logprobs` take, from the row state."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import floats, ints, longs, varying
from slotline.kernels.row_layout import (
    DEAD,
    FREQUENCY,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    SEEN,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WIDTH,
)

LINES = 128  # rows a program


class RowSettings(NamedTuple):
    """Columns of R rows; dead ones are greedy and tell no logprobs.

    Attributes:
        temperature, log_min_p: [R] float32.
        top_k: [R] int32.
        top_p: [R] float32.
        seeds, positions: [R] int64.
        asks: [R] int32, the row's own number, or -1 where it wants no logprobs.
        widths: [R] int32.
        repetition, frequency, presence: [R] float32.
        seen: [R] int32, the row's line in the table of seen tokens, -1 = no penalties.
    """

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor
    asks: Tensor
    widths: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    seen: Tensor


@varying("count")
def _settings_kernel(
    state: tl.tensor,
    stride: int,
    slots: tl.tensor,
    following: tl.tensor,
    temperature: tl.tensor,
    log_min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    asks: tl.tensor,
    widths: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    seen: tl.tensor,
    count: int,
    LINES: tl.constexpr,
) -> None:
    lane = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = lane < count
    row = state + tl.load(slots + lane, mask=inside, other=0).to(tl.int64) * stride
    alive = tl.load(row + DEAD, mask=inside, other=1) == 0
    heat = tl.load(row + TEMPERATURE, mask=inside, other=0).to(tl.float32, bitcast=True)
    tl.store(temperature + lane, tl.where(alive, heat, 0.0), mask=inside)
    tl.store(log_min_p + lane, tl.load(row + LOG_MIN_P, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    tl.store(top_k + lane, tl.load(row + TOP_K, mask=inside), mask=inside)
    tl.store(top_p + lane, tl.load(row + TOP_P, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    low = tl.load(row + SEED, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(row + SEED + 1, mask=inside, other=0).to(tl.int64)
    tl.store(seeds + lane, (high << 32) | low, mask=inside)
    tl.store(positions + lane, tl.load(following + lane, mask=inside, other=0).to(tl.int64), mask=inside)
    width = tl.where(alive, tl.load(row + WIDTH, mask=inside, other=-1), -1)
    tl.store(asks + lane, tl.where(width < 0, -1, lane), mask=inside)
    tl.store(widths + lane, tl.maximum(width, 0), mask=inside)
    tl.store(repetition + lane, tl.load(row + REPETITION, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    tl.store(frequency + lane, tl.load(row + FREQUENCY, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    tl.store(presence + lane, tl.load(row + PRESENCE, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    tl.store(seen + lane, tl.where(alive, tl.load(row + SEEN, mask=inside, other=-1), -1), mask=inside)


def row_settings(state: Tensor, slots: Tensor, following: Tensor) -> RowSettings:
    """Return the settings of R rows.

    Args:
        state: [S, W] int32, see `row_layout`.
        slots: [R] int32, each row's line.
        following: [R] int32, absolute position of the token that is sampled.
    """
    count, device = len(slots), state.device
    numbers = floats(device, count), floats(device, count), ints(device, count), floats(device, count)
    rest = longs(device, count), longs(device, count), ints(device, count), ints(device, count)
    penalties = floats(device, count), floats(device, count), floats(device, count), ints(device, count)
    out = RowSettings(*numbers, *rest, *penalties)
    args = (state, state.stride(0), slots, following, *out, count)
    _settings_kernel[(triton.cdiv(count, LINES),)](*args, LINES=LINES, num_warps=4)
    return out
