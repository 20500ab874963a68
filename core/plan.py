"""What crosses the border between the scheduler and a backend: StepPlan in, StepResult out.

Both are columnar: one numpy array per property, one entry per row of the step. Nothing here
knows of requests or text; a row is a number in ``range(max_slots)`` and its epoch tells one
occupant from the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slotline.params import SamplingParams

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.int8]

FEEDBACK = -1  # in StepPlan.token_ids: "the token you sampled last for this row"
NO_LOGPROBS = -1  # in RowSetup.logprobs / prompt_logprobs


class Status(IntEnum):
    """How one row came out of one step."""

    OK = 0
    STOP = 1  # the sampled token is one of the row's stop ids
    NAN = 2  # no finite logits; the token is not valid
    DEAD = 3  # the row had ended on the device in an earlier step; nothing was sampled
    WAIT = 4  # the row has no token yet; its last position is planned again


@dataclass(frozen=True, slots=True)
class RowSetup:
    """Everything a backend needs to know of a request, sent once when it enters a row.

    Attributes:
        row: the slot.
        epoch: the occupant's number; a result with another epoch is stale.
        params: resolved sampling parameters.
        seed: 64-bit, unsigned; already derived for choice j of n.
        token_ids: [L] int32, all tokens known now: the prompt, and after a preemption the output.
        prompt_len: how many of them are the prompt's.
        stop_ids: token ids that end the row (end tokens unless ignore_eos, and stop_token_ids).
        bad_words: token sequences that must not be completed; one-token words are banned outright.
        min_len: no stop id ends the row at a position below this (prompt_len + min_tokens); a backend
            with logits does not sample one there.
        max_len: prompt_len + max_tokens; the row never grows past it.
        adapter: 0 is none.
        logprobs: width for sampled tokens; NO_LOGPROBS if not wanted.
        prompt_logprobs: width for prompt positions; NO_LOGPROBS if not wanted.
        prompt_logprobs_from: first prompt position to deliver (later ones were delivered before
            a preemption); position 0 never has one.
        embed: deliver the normalised output of the last layer at the prompt's last position.
    """

    row: int
    epoch: int
    params: SamplingParams
    seed: int
    token_ids: IntArray
    prompt_len: int
    stop_ids: tuple[int, ...]
    min_len: int
    max_len: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0
    logprobs: int = NO_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS
    prompt_logprobs_from: int = 1
    embed: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which rows compute which tokens. ``R`` rows, ``T`` tokens in all.

    A backend first forgets ``ended``, then sets up ``admitted``, then appends ``new_blocks`` to
    each row's block table, then computes. Row ``i`` computes positions
    ``start[i] .. start[i] + count[i]``; where ``sample[i]`` holds, it samples the token of
    position ``start[i] + count[i]`` from the logits of its last computed position.

    Attributes:
        step_id: counts from 1.
        rows: [R] slot numbers, each at most once.
        epoch: [R] occupant numbers.
        start: [R] first position to compute.
        count: [R] how many, at least 1.
        token_ids: [T] flat; FEEDBACK (-1) = the token sampled last for that row.
        block_indptr: [R + 1] and
        block_ids: [B] the blocks to append to each row's table before computing (CSR).
        sample: [R] whether the row samples.
        admitted: rows that begin in this step.
        ended: [E] rows whose occupant is gone; their state can be dropped.
        masks: None, or a handle that the backend waits on between forward and sampling.
    """

    step_id: int
    rows: IntArray
    epoch: LongArray
    start: IntArray
    count: IntArray
    token_ids: IntArray
    block_indptr: IntArray
    block_ids: IntArray
    sample: BoolArray
    admitted: tuple[RowSetup, ...] = ()
    ended: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    masks: MaskHandle | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Return the number of positions computed."""
        return len(self.token_ids)


class MaskHandle(Protocol):
    """Allowed-token masks that are still being computed when the plan is launched."""

    def wait(self) -> tuple[IntArray, npt.NDArray[np.uint32]]:
        """Block until ready; return rows [M] and packed masks [M, ceil(V / 32)]."""


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of several positions, as one CSR table.

    Position ``p`` owns entries ``indptr[p] .. indptr[p + 1]``; the first is the token that is
    there (sampled, or of the prompt), then the best ones in falling order, without repeating
    the first. A position without values has an empty range.

    Attributes:
        indptr: [P + 1] int32.
        ids: [E] int32 token ids.
        values: [E] fp32 natural logs, finite and <= 0.
        ranks: [E] int32, 1 = most likely.
    """

    indptr: IntArray
    ids: IntArray
    values: FloatArray
    ranks: IntArray
    _lists: list[list[Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def lists(self) -> list[list[Any]]:
        """Return indptr, ids and values as lists, made once: all readers of a step's table share them."""
        if not self._lists:
            self._lists.extend(column.tolist() for column in (self.indptr, self.ids, self.values))
        return self._lists

    @classmethod
    def empty(cls, positions: int = 0) -> LogprobColumns:
        """Return a table of ``positions`` empty ranges."""
        none = np.empty(0, np.int32)
        return cls(np.zeros(positions + 1, np.int32), none, np.empty(0, np.float32), none)

    def slice(self, start: int, stop: int) -> LogprobColumns:
        """Return positions ``start .. stop`` as a table of their own (views, no copy of values)."""
        low, high = int(self.indptr[start]), int(self.indptr[stop])
        return LogprobColumns(
            self.indptr[start : stop + 1] - low, self.ids[low:high], self.values[low:high], self.ranks[low:high]
        )

    def select(self, positions: BoolArray) -> LogprobColumns:
        """Return the positions [P] that are true."""
        widths = np.diff(self.indptr)
        kept = np.repeat(positions, widths)
        indptr = np.zeros(int(np.count_nonzero(positions)) + 1, np.int32)
        np.cumsum(widths[positions], out=indptr[1:])
        return LogprobColumns(indptr, self.ids[kept], self.values[kept], self.ranks[kept])

    @classmethod
    def concat(cls, parts: Sequence[LogprobColumns]) -> LogprobColumns:
        """Return all positions of ``parts`` in one table."""
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        widths = [np.diff(p.indptr) for p in parts]
        indptr = np.concatenate([np.zeros(1, np.int32), np.cumsum(np.concatenate(widths), dtype=np.int32)])
        return cls(
            indptr.astype(np.int32),
            np.concatenate([p.ids for p in parts]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.ranks for p in parts]),
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, rows in the plan's order.

    A row that was to sample may have no token yet: WAIT. It then stays where it was, and a later plan asks for
    its last position again. A step that was launched meanwhile, to go on from the token that did not come, says
    WAIT too; what it wrote for the row is written again. A row must not wait for ever: steps that end count as
    progress, whatever they gave.

    Attributes:
        step_id, rows, epoch: as in the plan.
        tokens: [R, T] int32, T = 1 until speculation.
        n_tokens: [R] how many of them are valid (0 where the row did not sample, or NAN, DEAD or WAIT).
        status: [R] Status values.
        logprobs: one position per valid token, in row order; None if no row asked.
        prompt_counts: [R] prompt positions delivered per row; None if no row asked.
        prompt_logprobs: those positions, in row order.
        device_ms: time on the device.
        embeddings: (line of the plan, [C] fp32) of rows that asked and reached the end of their prompt.
    """

    step_id: int
    rows: IntArray
    epoch: LongArray
    tokens: IntArray
    n_tokens: IntArray
    status: ByteArray
    logprobs: LogprobColumns | None = None
    prompt_counts: IntArray | None = None
    prompt_logprobs: LogprobColumns | None = None
    device_ms: float = 0.0
    embeddings: tuple[tuple[int, FloatArray], ...] = ()
