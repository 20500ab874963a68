"""Rule out listed ids."""

from __future__ import annotations

from torch import Tensor


def rule_out(line: Tensor, ids: Tensor) -> None:
    """Set ids of one row [V] to -inf, NaN and +inf excepted."""
    x = line[ids]
    line[ids] = x.masked_fill(x < float("inf"), float("-inf"))


def listed(indptr: Tensor, ids: Tensor, row: int, vocab: int) -> Tensor:
    """Return a row's entries of a CSR list as a mask over all entries, without ids that are outside the vocabulary."""
    inside = (ids >= 0) & (ids < vocab)
    inside[: int(indptr[row])] = False
    inside[int(indptr[row + 1]) :] = False
    return inside


def ban_ids(
    logits: Tensor, indptr: Tensor, ids: Tensor, positions: Tensor | None = None, until: Tensor | None = None
) -> None:
    """Rule out each row's ids in place, before position ``until`` where that is given."""
    for row, line in enumerate(logits):
        if positions is None or until is None or positions[row] < until[row]:
            rule_out(line, ids[listed(indptr, ids, row, len(line))].long())
