"""What a committed step means for sequences: the columnar message from the core to its clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from slotline.errors import SlotlineError
from slotline.plan import BoolArray, FloatArray, IntArray, LogprobColumns, LongArray, StepResult


class Finish(IntEnum):
    """How a sequence ends, as far as the core can tell."""

    NO = 0
    STOP = 1  # an end token or stop id
    LENGTH = 2
    NAN = 3  # no finite logits


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """One step's news, one entry per sequence that has any.

    Attributes:
        step_id: the step.
        seq_ids: [K] whose news.
        tokens: [K, T] sampled ids.
        n_tokens: [K] how many are valid.
        finish: [K] Finish values.
        logprobs: one position per valid token, in order; None if nobody asked.
        prompt_counts: [K] prompt positions per sequence; None if nobody asked.
        prompt_logprobs: those positions, in order.
        admitted: (seq_id, cached tokens) of sequences that got their first row.
        errors: (seq_id, error) of sequences that ended with an error.
        device_ms: time of the step on the device.
        embeddings: (seq_id, [C]) of prompts that were to be embedded.
    """

    step_id: int
    seq_ids: LongArray
    tokens: IntArray
    n_tokens: IntArray
    finish: IntArray
    logprobs: LogprobColumns | None = None
    prompt_counts: IntArray | None = None
    prompt_logprobs: LogprobColumns | None = None
    admitted: tuple[tuple[int, int], ...] = ()
    errors: tuple[tuple[int, SlotlineError], ...] = ()
    device_ms: float = 0.0
    embeddings: tuple[tuple[int, FloatArray], ...] = ()

    def select(self, keep: BoolArray) -> OutputBatch:
        """Return the news of some sequences, with what is not about single ones; keep: [K]."""
        if keep.all():
            return self
        counts = self.prompt_counts
        return replace(
            self,
            seq_ids=self.seq_ids[keep],
            tokens=self.tokens[keep],
            n_tokens=self.n_tokens[keep],
            finish=self.finish[keep],
            logprobs=_select(self.logprobs, self.n_tokens, keep),
            prompt_counts=None if counts is None else counts[keep],
            prompt_logprobs=None if counts is None else _select(self.prompt_logprobs, counts, keep),
        )


def collect_outputs(
    result: StepResult, seq_ids: LongArray, live: BoolArray, finish: IntArray, admitted: tuple[tuple[int, int], ...]
) -> OutputBatch:
    """Keep what concerns live rows.

    Args:
        seq_ids: [R] occupant of each row of the step.
        live: [R] whether it is still the one that the step was launched for.
        finish: [R] Finish values.
    """
    keep = live
    embedded = tuple((int(seq_ids[line]), vector) for line, vector in result.embeddings if live[line])
    if result.prompt_counts is None:
        keep = live & ((result.n_tokens > 0) | (finish > 0))
    batch = OutputBatch(
        result.step_id, seq_ids, result.tokens, result.n_tokens, finish, result.logprobs,
        result.prompt_counts, result.prompt_logprobs, admitted, (), result.device_ms, embedded,
    )  # fmt: skip
    return batch.select(keep)


def error_batch(errors: tuple[tuple[int, SlotlineError], ...]) -> OutputBatch:
    """Return a message that carries nothing but errors."""
    none = np.empty(0, np.int32)
    return OutputBatch(0, np.empty(0, np.int64), np.empty((0, 1), np.int32), none, none, errors=errors)


def _select(columns: LogprobColumns | None, counts: IntArray, keep: BoolArray) -> LogprobColumns | None:
    """Return the positions of the rows that are kept."""
    if columns is None:
        return None
    return columns.select(np.repeat(keep, counts))
