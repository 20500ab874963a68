"""What rows sampled, noted in the row state."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.row_layout import DEAD, LAST, MIN_LEN, STOP_IDS, STOPS


def finish_rows(state: Tensor, slots: Tensor, following: Tensor, tokens: Tensor, found: Tensor) -> Tensor:
    """Return the status of rows [R], and change state [S, W] in place."""
    out = torch.zeros_like(tokens)
    for i, (slot, position, token, bad) in enumerate(
        zip(slots.tolist(), following.tolist(), tokens.tolist(), found.tolist(), strict=True)
    ):
        row = state[slot]
        if row[DEAD.value]:
            out[i] = 3
            continue
        stops = row[STOP_IDS.value : STOP_IDS.value + int(row[STOPS.value])].tolist()
        out[i] = 2 if bad else 1 if token in stops and position >= row[MIN_LEN.value] else 0
        row[LAST.value] = token
        row[DEAD.value] = int(out[i] != 0)
    return out
