"""Write the scores that a draw was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.sample import LARGEST, ordered_key


def drop_rest(logits: Tensor, rows: Tensor, temperature: Tensor, cut_keys: Tensor, cut_ids: Tensor) -> None:
    """Turn logits of rows [M] into scores in place: -inf where the token is not a candidate."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for row in rows.tolist():
        if row >= 0 and temperature[row] > 0:
            scores = (logits[row] / temperature[row]).clamp(max=LARGEST)
            keys = ordered_key(scores)
            stays = (keys > cut_keys[row]) | ((keys == cut_keys[row]) & (ids <= cut_ids[row]))
            logits[row] = scores.masked_fill(~stays, float("-inf"))
