"""Ids, places and lengths of a step's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.row_layout import DEAD, LAST, PAGE, TABLE
from slotline.kernels.token_inputs import TokenInputs


def token_inputs(
    state: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, decoding: Tensor, lines: int
) -> TokenInputs:
    """Return the inputs of tokens [T] from the row state [S, W]."""
    rows = state[slots.long()]
    alive = rows[:, DEAD.value] == 0
    ids = torch.where(tokens < 0, rows[:, LAST.value], tokens)
    block = rows.gather(1, (TABLE.value + positions // PAGE).long()[:, None])[:, 0]
    places = torch.where(alive, block, 0) * PAGE + positions % PAGE
    first = torch.arange(len(tokens), device=tokens.device) < decoding
    lengths = torch.where(first & alive, positions + 1, 0)[:lines]
    return TokenInputs(ids, places.int(), lengths.int())
