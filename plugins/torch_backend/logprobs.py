"""Log-probabilities as columns: the token that is there, then the best ones, ties by lowest id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slotline.plan import IntArray, LogprobColumns, LongArray
from slotline.plugins.torch_backend.ranking import best, rank


def tabulate(values: Tensor, tokens: LongArray, widths: LongArray) -> LogprobColumns:
    """Return one position per row of ``values``.

    Args:
        values: [P, V] log-softmax, float32.
        tokens: [P] the token that is there.
        widths: [P] how many of the best are told beside it; it is not repeated among them.
    """
    own, ranks = _own(values, tokens)
    width = int(widths.max(initial=0))
    top, ids = best(values, width) if width else (np.empty((len(tokens), 0), np.float32), np.empty((len(tokens), 0)))
    places = np.arange(top.shape[1])
    wanted = (places < widths[:, None]) & (ids != tokens[:, None]) & np.isfinite(top)  # dropped candidates are left out
    all_ids = np.concatenate([tokens[:, None], ids], 1)
    all_values = np.concatenate([own[:, None], top], 1)
    all_ranks = np.concatenate([ranks[:, None], np.broadcast_to(places + 1, top.shape)], 1)
    wanted = np.concatenate([np.isfinite(own)[:, None], wanted], 1)
    return LogprobColumns(
        _indptr(wanted.sum(1)),
        all_ids[wanted].astype(np.int32),
        np.minimum(all_values[wanted], 0.0).astype(np.float32),  # rounding may end a hair above zero
        all_ranks[wanted].astype(np.int32),
    )


def merge(parts: Sequence[tuple[LongArray, LogprobColumns]], positions: int) -> LogprobColumns:
    """Return one table of ``positions`` from parts that say which positions they hold."""
    tables = [LogprobColumns.empty(1)] * positions
    for places, columns in parts:
        for i, place in enumerate(places.tolist()):
            tables[place] = columns.slice(i, i + 1)
    return LogprobColumns.concat(tables)


def _own(values: Tensor, tokens: LongArray) -> tuple[npt.NDArray[np.float32], LongArray]:
    """Return the value and the rank of the token that is there."""
    index = torch.from_numpy(tokens).to(values.device)[:, None]
    own = values.gather(-1, index)  # [P, 1]
    found: npt.NDArray[np.float32] = own.squeeze(-1).cpu().numpy()
    return found, rank(values, tokens, found)


def _indptr(widths: npt.NDArray[np.integer]) -> IntArray:
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
