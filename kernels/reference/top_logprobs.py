"""Logprobs of a given token and of the best N, and the given token's rank, from a sorted row."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.logsumexp import logsumexp
from slotline.kernels.reference.sample import ranked
from slotline.kernels.results import OK, TopLogprobs


def top_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, widths: Tensor, columns: int) -> TopLogprobs:
    """Return logprobs of M entries; those of row -1 are left empty."""
    count, columns = len(rows), min(columns, logits.shape[1])
    device = logits.device
    ids = torch.full((count, columns), -1, dtype=torch.int32, device=device)
    values = torch.full((count, columns), float("-inf"), device=device)
    own = torch.full((count,), float("-inf"), device=device)
    ranks, counts, status = torch.zeros(3, count, dtype=torch.int32, device=device)
    for entry, (row, token, width) in enumerate(zip(rows.tolist(), tokens.tolist(), widths.tolist(), strict=True)):
        if row < 0:
            continue
        peaks, logs, state = logsumexp(logits[row : row + 1])
        status[entry] = state
        x = logits[row]
        ranks[entry] = 1 + (x > x[token]).sum() + (x[:token] == x[token]).sum()
        if state != OK:
            continue
        logprobs = ((x - peaks) - logs).clamp(max=0.0)
        best = ranked(x)[: min(width, columns)]
        best = best[x[best] > float("-inf")]
        own[entry], counts[entry] = logprobs[token], len(best)
        ids[entry, : len(best)], values[entry, : len(best)] = best.int(), logprobs[best]
    return TopLogprobs(own, ranks, ids, values, counts, status)
