"""Keep the table of seen tokens: 2 (times output) + (1 if the prompt has it)."""

from __future__ import annotations

from torch import Tensor


def note_tokens(seen: Tensor, slots: Tensor, tokens: Tensor, *, output: bool) -> None:
    """Note tokens [T] of slots [T] in place in seen [S, V]."""
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if slot >= 0 and 0 <= token < seen.shape[1]:
            seen[slot, token] = seen[slot, token] + 2 if output else seen[slot, token] | 1
