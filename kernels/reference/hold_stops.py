"""Stop ids ruled out below a row's minimum length."""

from __future__ import annotations

from torch import Tensor

from slotline.kernels.row_layout import DEAD, MIN_LEN, STOP_IDS, STOPS


def hold_stops(logits: Tensor, state: Tensor, slots: Tensor, following: Tensor) -> None:
    """Change logits [R, V] of the rows in place."""
    for i, (slot, position) in enumerate(zip(slots.tolist(), following.tolist(), strict=True)):
        row = state[slot]
        if not row[DEAD.value] and position < row[MIN_LEN.value]:
            stops = row[STOP_IDS.value : STOP_IDS.value + int(row[STOPS.value])].tolist()
            for stop in stops:
                if 0 <= stop < logits.shape[1] and not logits[i, stop].isnan() and logits[i, stop] != float("inf"):
                    logits[i, stop] = float("-inf")
