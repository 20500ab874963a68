"""The columns that sampling takes, from the row state."""

from __future__ import annotations

import torch
from torch import Tensor

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
from slotline.kernels.row_settings import RowSettings


def row_settings(state: Tensor, slots: Tensor, following: Tensor) -> RowSettings:
    """Return the settings of rows [R]."""
    rows = state[slots.long()]

    def number(word: int) -> Tensor:
        return rows[:, word].contiguous().view(torch.float32)

    alive = rows[:, DEAD.value] == 0
    seeds = (rows[:, SEED.value + 1].long() << 32) | (rows[:, SEED.value].long() & 0xFFFFFFFF)
    width = torch.where(alive, rows[:, WIDTH.value], -1)
    lines = torch.arange(len(slots), dtype=torch.int32, device=state.device)
    return RowSettings(
        torch.where(alive, number(TEMPERATURE.value), 0.0),
        number(LOG_MIN_P.value),
        rows[:, TOP_K.value],
        number(TOP_P.value),
        seeds,
        following.long(),
        torch.where(width < 0, -1, lines),
        width.clamp(min=0),
        number(REPETITION.value),
        number(FREQUENCY.value),
        number(PRESENCE.value),
        torch.where(alive, rows[:, SEEN.value], -1),
    )
