"""What changes logits before the temperature: masks, bad words, bias, penalties, processors, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from slotline.plan import LongArray, MaskHandle
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rows import Row

_DROPPED = float("-inf")


def adjust(logits: Tensor, special: Sequence[tuple[int, Row]], positions: LongArray, processors: Processors) -> None:
    """Change the logits of rows that ask for it, in place.

    Args:
        logits: [R, V] float32.
        special: those rows, each with its line.
        positions: [R] absolute position of the token that is sampled.
    """
    if not special:
        return
    for i, row in special:
        if row.allowed is not None:
            _keep_only(logits[i], row.allowed)
    place = _Places([(i, row.forbidden(int(positions[i]))) for i, row in special], logits.device)
    if place:
        logits[place.lines, place.ids] = _DROPPED
    biased = [(i, row) for i, row in special if len(row.bias_ids)]
    place = _Places([(i, row.bias_ids) for i, row in biased], logits.device)
    if place:
        bias = np.concatenate([row.bias for _, row in biased])
        logits[place.lines, place.ids] += torch.from_numpy(bias).to(logits.device)
    _penalise(logits, special)
    processors.apply(logits, special)


class _Places:
    """Ids of several rows as one pair of index tensors."""

    def __init__(self, parts: Sequence[tuple[int, LongArray]], device: torch.device) -> None:
        sizes = np.array([len(ids) for _, ids in parts], np.int64)
        lines = np.repeat(np.array([i for i, _ in parts], np.int64), sizes)
        flat = np.concatenate([ids for _, ids in parts]) if parts else lines
        self.lines = torch.from_numpy(lines).to(device)
        self.ids = torch.from_numpy(flat).to(device)

    def __len__(self) -> int:
        return len(self.ids)


def _keep_only(line: Tensor, ids: LongArray) -> None:
    index = torch.from_numpy(ids).to(line.device)
    kept = line[index]
    line.fill_(_DROPPED)
    line[index] = kept


def apply_masks(logits: Tensor, slots: Sequence[int], masks: MaskHandle) -> None:
    """Drop what a grammar rules out: bit i of word w stands for id 32 w + i.

    Args:
        logits: [R, V] float32, changed in place.
        slots: [R] of the rows.
    """
    masked, packed = masks.wait()
    line_of = {slot: i for i, slot in enumerate(slots)}
    vocab = logits.shape[-1]
    for slot, words in zip(masked.tolist(), packed, strict=True):
        if slot in line_of:
            bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[:vocab]
            logits[line_of[slot]].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), _DROPPED)


def _penalise(logits: Tensor, special: Iterable[tuple[int, Row]]) -> None:
    """Apply repetition, then frequency and presence penalties."""
    seen = [(i, row.seen) for i, row in special if row.seen is not None]
    place = _Places([(i, s.ids) for i, s in seen], logits.device)
    if not place:
        return
    sizes = [len(s.ids) for _, s in seen]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    counts = torch.from_numpy(np.concatenate([s.counts for _, s in seen])).to(logits.device)
    values = logits[place.lines, place.ids]
    repetition = spread([s.repetition for _, s in seen])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([s.frequency for _, s in seen]) * counts
    values -= spread([s.presence for _, s in seen]) * (counts > 0)
    logits[place.lines, place.ids] = values
