"""The best of each row, without sorting the vocabulary. Ties go to the lowest id."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WIDTHS = (64, 1024)  # how many of the best are looked at before a row is sorted whole


def keep_best(scores: Tensor, counts: npt.NDArray[np.int64], thresholds: npt.NDArray[np.float32]) -> None:
    """Keep each row's ``counts`` best scores; set the others to -inf.

    Args:
        scores: [R, V], changed in place.
        counts: [R] how many stay.
        thresholds: [R] the score of the last one that stays.
    """
    limit = torch.from_numpy(thresholds).to(scores.device)[:, None]
    at_least = (scores >= limit).sum(-1).cpu().numpy()
    scores.masked_fill_(scores < limit, float("-inf"))
    for i in np.flatnonzero(at_least > counts).tolist():
        tied = (scores[i] == limit[i]).nonzero().squeeze(-1)  # ids in rising order
        above = int(at_least[i]) - len(tied)
        scores[i, tied[int(counts[i]) - above :]] = float("-inf")


def best(values: Tensor, width: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the ``width`` largest values of each row [R, V] and their ids, falling, ties by id."""
    width = min(width, values.shape[-1])
    top, ids = (t.cpu().numpy() for t in values.topk(width))  # [R, width]
    order = np.lexsort((ids, -top))
    top, ids = np.take_along_axis(top, order, -1), np.take_along_axis(ids, order, -1)
    last = torch.from_numpy(top[:, -1:]).to(values.device)
    tied = (values >= last).sum(-1).cpu().numpy() > width  # topk chose among equals as it liked
    for i in np.flatnonzero(tied & np.isfinite(top[:, -1])).tolist():
        found = (values[i] >= last[i]).nonzero().squeeze(-1)
        found_values = values[i, found].cpu().numpy()
        chosen = np.lexsort((found.cpu().numpy(), -found_values))[:width]
        top[i], ids[i] = found_values[chosen], found.cpu().numpy()[chosen]
    return top, ids


def nucleus(
    scores: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return how many of each row's best stay under top_k, then top_p, and the last one's score.

    A token is dropped when the tokens before it hold at least top_p of the mass that top_k left.

    Args:
        scores: [R, V] logits, -inf where already dropped; the largest of each row is finite.
        top_k: [R] at least 1; V is off.
        top_p: [R] 1 is off.
    """
    counts, lasts = np.zeros(len(scores), np.int64), np.zeros(len(scores), np.float32)
    rest = np.arange(len(scores))
    for width in _widths(scores.shape[-1]):
        part = scores if len(rest) == len(scores) else scores[torch.from_numpy(rest).to(scores.device)]
        count, last, known = _prefix(part, width, top_k[rest], top_p[rest])
        counts[rest[known]], lasts[rest[known]] = count[known], last[known]
        rest = rest[~known]
        if not len(rest):
            break
    return counts, lasts


def _widths(vocab: int) -> Iterable[int]:
    yield from (w for w in WIDTHS if w < vocab)
    yield vocab


def _prefix(
    scores: Tensor, width: int, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Decide from the ``width`` best; the last array tells for which rows they were enough."""
    vocab = scores.shape[-1]
    top = scores.topk(width).values  # [R, width]
    peak = top[:, :1].double()
    mass = torch.exp(top.double() - peak).cumsum(-1).cpu().numpy()
    top_host = top.cpu().numpy()
    lines = np.arange(len(scores))
    total = mass[lines, np.minimum(top_k, width) - 1]
    whole = np.flatnonzero((top_k >= vocab) & (top_p < 1.0))  # their mass is that of the whole row
    if len(whole):
        select = torch.from_numpy(whole).to(scores.device)
        total[whole] = torch.exp(scores[select].double() - peak[select]).sum(-1).cpu().numpy()
    # The first token always stays; the one after position j stays while mass[j] is under the limit.
    kept = 1 + (mass < (top_p * total)[:, None]).sum(-1)
    known = (top_k <= width) | ((top_k >= vocab) & (top_p < 1.0) & (kept <= width)) | (width == vocab)
    kept = np.minimum(np.where(top_p < 1.0, kept, top_k), np.minimum(top_k, vocab))
    count = np.minimum(kept, width)
    return count, top_host[lines, count - 1], known
