"""Draw one token a row after temperature, min_p, top_k and top_p, by sorting the row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slotline.kernels.reference.argmax import argmax
from slotline.kernels.reference.philox import random_bits
from slotline.kernels.results import OK, Sampled

LARGEST = torch.finfo(torch.float32).max


def ordered_key(x: Tensor) -> Tensor:
    """Return int64 keys that are ordered as the float32 numbers are."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


def ranked(scores: Tensor) -> Tensor:
    """Return the ids of one row [V], falling by score, ties by id."""
    return torch.sort(torch.where(scores == 0, 0.0, scores), descending=True, stable=True).indices


def weights(scores: Tensor) -> Tensor:
    """Return [V] int64 floor(2**44 exp(s - max)) of one row."""
    return (torch.exp(scores - scores.amax()) * 2.0**44).long()


def sample(
    logits: Tensor,
    temperature: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Sampled:
    """Return a token for each row [R, V]."""
    vocab = logits.shape[1]
    tokens, status = argmax(logits)
    cut_keys = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    cut_ids = torch.full_like(tokens, vocab)
    bits = random_bits(seeds, positions).tolist()
    for row, line in enumerate(logits):
        if temperature[row] <= 0 or status[row] != OK:
            continue
        scores = (line / temperature[row]).clamp(max=LARGEST)
        order = ranked(scores)
        stay = count_kept(scores[order], log_min_p[row], int(top_k[row]), float(top_p[row]))
        cut_keys[row], cut_ids[row] = ordered_key(scores)[order[stay - 1]], order[stay - 1]
        candidates = order[:stay].sort().values
        reached = weights(scores)[candidates].cumsum(0)
        target = (bits[row] * int(reached[-1])) >> 53
        tokens[row] = candidates[int((reached <= target).sum())]
    return Sampled(tokens, status, cut_keys, cut_ids)


def count_kept(falling: Tensor, log_min_p: Tensor, top_k: int, top_p: float) -> int:
    """Return how many of the first of a row's scores [V], in falling order, are candidates."""
    stay = int(((falling >= falling[0] + log_min_p) & falling.isfinite()).sum())
    if top_k > 0:
        stay = min(stay, top_k)
    if top_p < 1.0:
        mass = weights(falling)[:stay]
        limit = max(1, math.ceil(top_p * int(mass.sum())))
        stay = int((mass.cumsum(0) - mass < limit).sum())
    return stay
