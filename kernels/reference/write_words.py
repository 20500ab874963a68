"""Write single words of the row state."""

from __future__ import annotations

from torch import Tensor


def write_words(state: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values [N] to places [N] of state [S, W], in place."""
    state.view(-1)[places.long()] = values
