"""The best of each row, without sorting the vocabulary. Ties go to the lowest id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WIDTHS = (64, 1024)  # how many of the best are looked at before a row is sorted whole


@dataclass(frozen=True, slots=True)
class Cut:
    """Where each of R rows is cut off.

    Attributes:
        counts: [R] how many of the best stay.
        lasts: [R] the score of the last one that stays.
        tied: [R] true where others may have that score, too.
    """

    counts: npt.NDArray[np.int64]
    lasts: npt.NDArray[np.float32]
    tied: npt.NDArray[np.bool_]


def keep_best(scores: Tensor, cut: Cut) -> None:
    """Set every score [R, V] behind the cut to -inf, in place."""
    scores.masked_fill_(scores < torch.from_numpy(cut.lasts).to(scores.device)[:, None], float("-inf"))
    for i in np.flatnonzero(cut.tied).tolist():
        equal = (scores[i] == float(cut.lasts[i])).nonzero().squeeze(-1)  # ids in rising order
        above = int((scores[i] > float(cut.lasts[i])).sum())
        scores[i, equal[int(cut.counts[i]) - above :]] = float("-inf")


def count_at_least(values: Tensor, limits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return [R] how many values of each row [R, V] reach its limit [R]."""
    if values.device.type != "cpu":
        return (values >= torch.from_numpy(limits).to(values.device)[:, None]).sum(-1).cpu().numpy()
    # Row by row through numpy: a tenth of what summing a tensor of booleans takes.
    return np.array([np.count_nonzero(row >= limit) for row, limit in zip(values.numpy(), limits, strict=True)])


def rank(values: Tensor, ids: npt.NDArray[np.int64], own: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return [R] the place of one id of each row among its values, 1 = largest; the lower id goes before its equal.

    Args:
        values: [R, V].
        ids: [R].
        own: [R] the values at ``ids``.
    """
    ranks = count_at_least(values, own)  # itself, those above, and its equals
    following = np.nextafter(own, np.float32(np.inf))
    above = count_at_least(values, following)
    for i in np.flatnonzero(ranks > above + 1).tolist():
        ranks[i] = above[i] + 1 + int((values[i, : int(ids[i])] == float(own[i])).sum())
    return ranks


def best(values: Tensor, width: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the ``width`` largest values of each row [R, V] and their ids, falling, ties by id."""
    width = min(width, values.shape[-1])
    top, ids = (t.cpu().numpy() for t in values.topk(width))  # [R, width]
    order = np.lexsort((ids, -top))
    top, ids = np.take_along_axis(top, order, -1), np.take_along_axis(ids, order, -1)
    tied = count_at_least(values, top[:, -1]) > width  # topk chose among equals as it liked
    for i in np.flatnonzero(tied & np.isfinite(top[:, -1])).tolist():
        found = (values[i] >= float(top[i, -1])).nonzero().squeeze(-1)
        found_values = values[i, found].cpu().numpy()
        chosen = np.lexsort((found.cpu().numpy(), -found_values))[:width]
        top[i], ids[i] = found_values[chosen], found.cpu().numpy()[chosen]
    return top, ids


def nucleus(scores: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> Cut:
    """Find where top_k, then top_p cut each row off.

    A token is dropped when the tokens before it hold at least top_p of the mass that top_k left.

    Args:
        scores: [R, V] logits, -inf where already dropped; the largest of each row is finite.
        top_k: [R] at least 1; V is off.
        top_p: [R] 1 is off.
    """
    size = len(scores)
    cut = Cut(np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, bool))
    rest = np.arange(size)
    for width in (*(w for w in WIDTHS if w < scores.shape[-1]), scores.shape[-1]):
        part = scores if len(rest) == size else scores[torch.from_numpy(rest).to(scores.device)]
        known = _cut_within(part, width, top_k[rest], top_p[rest], cut, rest)
        rest = rest[~known]
        if not len(rest):
            break
    return cut


def _cut_within(
    scores: Tensor,
    width: int,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    cut: Cut,
    places: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Fill in ``cut`` at ``places`` from the ``width`` best, and return for which rows they were enough."""
    vocab = scores.shape[-1]
    top = scores.topk(width).values  # [R, width]
    mass = torch.exp(top.double() - top[:, :1]).cumsum(-1).cpu().numpy()  # in units of the best one's
    lines = np.arange(len(scores))
    total = mass[lines, np.minimum(top_k, width) - 1]
    whole = np.flatnonzero((top_k >= vocab) & (top_p < 1.0))
    if len(whole):
        total[whole] = _mass_of_all(scores[torch.from_numpy(whole).to(scores.device)])
    # The first token always stays; the one after position j stays while mass[j] is under the limit.
    by_mass = 1 + (mass < (top_p * total)[:, None]).sum(-1)
    known = (top_k <= width) | ((top_k >= vocab) & (top_p < 1.0) & (by_mass <= width)) | (width == vocab)
    counts = np.minimum(np.where(top_p < 1.0, np.minimum(by_mass, top_k), top_k), width)
    ranked = top.cpu().numpy()
    lasts = ranked[lines, counts - 1]
    following = ranked[lines, np.minimum(counts, width - 1)]
    cut.counts[places], cut.lasts[places] = counts, lasts
    cut.tied[places] = (counts < vocab) & (following == lasts)  # also where all that was looked at stays
    enough: npt.NDArray[np.bool_] = known
    return enough


def _mass_of_all(scores: Tensor) -> npt.NDArray[np.float64]:
    """Return [R] the sum of each row's probabilities in units of its largest.

    Softmax goes row by row in one order; a plain sum may be split among threads when there is one row.
    """
    shares: npt.NDArray[np.float32] = torch.softmax(scores, -1).amax(-1).cpu().numpy()
    return 1.0 / shares.astype(np.float64)
