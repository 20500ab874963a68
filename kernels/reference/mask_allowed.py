"""Rule out what a packed mask does not allow."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.ban_ids import rule_out


def mask_allowed(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Apply masks [M, ceil(V / 32)] in place to rows [M] of logits [R, V]."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for mask, row in zip(masks, rows.tolist(), strict=True):
        if row >= 0:
            allowed = (mask[ids // 32] >> (ids % 32)) & 1 != 0
            rule_out(logits[row], ids[~allowed])
