"""What the ops return: tensors by name, the same from the Triton ops and from their references."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

OK = 0
NOTHING_LEFT = 1  # every logit of the row is -inf
NOT_FINITE = 2  # a logit of the row is NaN or +inf


class Best(NamedTuple):
    """The best token of each row: ids [R] int32 (0 where the status is not OK) and status [R] int32."""

    tokens: Tensor
    status: Tensor


class LogSums(NamedTuple):
    """Log-sum-exp of each row in two parts, which keep their digits where logits are large.

    Attributes:
        peaks: [R] float32, the largest logit.
        logs: [R] float32, log sum exp(x - peak); NaN where the status is not OK.
        status: [R] int32.
    """

    peaks: Tensor
    logs: Tensor
    status: Tensor

    @property
    def values(self) -> Tensor:
        """Return [R] the log-sum-exp."""
        return self.peaks + self.logs


class Sampled(NamedTuple):
    """One token for each row, and where the row was cut off.

    A token is a candidate if its ordered key is above the row's cut key, or equal to it and its id at most the cut id.

    Attributes:
        tokens: [R] int32, 0 where the status is not OK.
        status: [R] int32.
        cut_keys: [R] int64, ordered keys of float32 (see `ordering`); 0 keeps everything, as in greedy rows.
        cut_ids: [R] int32.
    """

    tokens: Tensor
    status: Tensor
    cut_keys: Tensor
    cut_ids: Tensor


class TopLogprobs(NamedTuple):
    """Natural logarithms of probabilities: of one given token, and of the best N, for each of M entries.

    Attributes:
        own: [M] float32 of the given token, at most 0; -inf where it is ruled out or the status is not OK.
        ranks: [M] int32, 1 + the number of tokens ahead of it, where the status is OK; equal ones are ahead if their id
            is lower.
        ids: [M, N] int32, falling by value, ties by id; -1 behind the entry's count.
        values: [M, N] float32, at most 0; -inf behind the count.
        counts: [M] int32, how many of the best are told: the entry's width, or fewer where fewer are not ruled out.
        status: [M] int32.
    """

    own: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor
    counts: Tensor
    status: Tensor
