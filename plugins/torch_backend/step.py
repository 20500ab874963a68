"""One step: bring the rows up to date, compute, sample, and say what came out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slotline.backend import BackendInfo, StepHandle
from slotline.plan import (
    FEEDBACK,
    NO_LOGPROBS,
    BoolArray,
    FloatArray,
    IntArray,
    LogprobColumns,
    LongArray,
    Status,
    StepPlan,
    StepResult,
)
from slotline.plugins.torch_backend.logprobs import merge, tabulate
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rows import Row
from slotline.plugins.torch_backend.sampler import Sampled, Sampler

PROMPT_CHUNK = 256  # prompt positions whose logits exist at the same time


@dataclass(slots=True)
class _Work:
    """The rows of a plan that are still alive, and what they compute."""

    lines: IntArray  # [A] their places in the plan
    rows: list[Row]
    start: LongArray  # [A]
    count: LongArray  # [A]
    token_ids: LongArray  # [T]
    sample: BoolArray  # [A]

    @property
    def ends(self) -> LongArray:
        """Return [A] one past each row's last token in the step."""
        return np.cumsum(self.count)


@dataclass(slots=True)
class _Outcome:
    """A result in the making, in the plan's order."""

    tokens: IntArray  # [R]
    n_tokens: IntArray  # [R]
    status: np.ndarray[tuple[int], np.dtype[np.int8]]  # [R]
    tables: list[tuple[LongArray, LogprobColumns]] = field(default_factory=list)  # by line of the plan
    asked: bool = False
    prompt_counts: IntArray | None = None
    prompt_logprobs: LogprobColumns | None = None
    embeddings: tuple[tuple[int, FloatArray], ...] = ()


class Forward(Protocol):
    """What computes hidden states and logits."""

    def hidden(
        self, pool: Tensor, token_ids: Tensor, positions: Tensor, lengths: Tensor | None, attention: Any
    ) -> Tensor:
        """Return [T, C] for tokens [T]; ``attention`` is what the planner made for this step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, V] in float32."""


class Planner(Protocol):
    """What prepares attention."""

    def plan(self, rows: Sequence[Row], start: LongArray, count: LongArray) -> Any:
        """Return what ``Forward.hidden`` takes, for rows that compute ``count`` positions from ``start`` on."""


class Runner:
    """Everything that a loaded backend holds."""

    def __init__(
        self,
        *,
        info: BackendInfo,
        device: torch.device,
        decoder: Forward,
        planner: Planner,
        pool: Tensor,
        sampler: Sampler,
        processors: Processors,
        uses_lengths: bool = False,
    ) -> None:
        self.info = info
        self._device = device
        self._decoder = decoder
        self._planner = planner
        self._pool = pool  # [layers, places, 2 * K * D]
        self._sampler = sampler
        self._processors = processors
        self._uses_lengths = uses_lengths  # a token's rotation depends on its sequence's length
        self._rows: dict[int, Row] = {}

    def release(self, rows: Iterable[int]) -> None:
        """Forget rows."""
        for slot in rows:
            row = self._rows.pop(slot, None)
            if row is not None:
                self._processors.remove(row)

    def run(self, plan: StepPlan, began: float) -> StepResult:
        """Compute a step that began at a time of `time.perf_counter`."""
        self._bring_up_to_date(plan)
        work, outcome = self._sort_out(plan)
        if work.rows:
            hidden = self._forward(work)
            self._score_prompts(work, hidden, outcome)
            self._embed(work, hidden, outcome)
            self._sample(plan, work, hidden, outcome)
        return _result(plan, outcome, time.perf_counter() - began)

    def _bring_up_to_date(self, plan: StepPlan) -> None:
        self.release(plan.ended.tolist())
        for setup in plan.admitted:
            self.release([setup.row])
            row = Row(setup, self.info.vocab_size, self.info.block_size)
            self._rows[setup.row] = row
            row.refused = not self._processors.add(row)
        bounds = plan.block_indptr.tolist()
        for i, slot in enumerate(plan.rows.tolist()):
            if bounds[i] < bounds[i + 1]:
                self._rows[slot].add_blocks(plan.block_ids[bounds[i] : bounds[i + 1]])

    def _sort_out(self, plan: StepPlan) -> tuple[_Work, _Outcome]:
        """Leave out rows that are over, and look up the tokens that were sampled here."""
        rows = [self._rows[slot] for slot in plan.rows.tolist()]
        status = np.zeros(len(rows), np.int8)
        for i, (row, epoch) in enumerate(zip(rows, plan.epoch.tolist(), strict=True)):
            if row.setup.epoch != epoch:
                raise RuntimeError(f"the plan has epoch {epoch} for row {row.setup.row}, here it is {row.setup.epoch}")
            if row.dead:
                status[i] = Status.DEAD
            elif row.refused:
                status[i] = Status.NAN
        alive = status == Status.OK
        lines = np.flatnonzero(alive).astype(np.int32)
        token_ids = plan.token_ids[np.repeat(alive, plan.count)].astype(np.int64)
        work = _Work(
            lines,
            [rows[i] for i in lines.tolist()],
            plan.start[alive].astype(np.int64),
            plan.count[alive].astype(np.int64),
            token_ids,
            plan.sample[alive],
        )
        owner = np.repeat(np.arange(len(lines)), work.count)
        for place in np.flatnonzero(token_ids == FEEDBACK).tolist():
            token_ids[place] = work.rows[owner[place]].last_token
        return work, _Outcome(np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32), status)

    def _forward(self, work: _Work) -> Tensor:
        attention = self._planner.plan(work.rows, work.start, work.count)
        first = work.ends - work.count
        positions = np.arange(len(work.token_ids)) + np.repeat(work.start - first, work.count)
        lengths = self._lengths(work, positions)
        return self._decoder.hidden(
            self._pool, self._tensor(work.token_ids), self._tensor(positions), lengths, attention
        )

    def _lengths(self, work: _Work, positions: LongArray) -> Tensor | None:
        """Return [T] the prompt's length for its tokens, each one's own for those sampled; None if nobody asks."""
        if not self._uses_lengths:
            return None
        prompts = np.array([row.setup.prompt_len for row in work.rows], np.int64)
        return self._tensor(np.maximum(np.repeat(prompts, work.count), positions + 1))

    def _score_prompts(self, work: _Work, hidden: Tensor, outcome: _Outcome) -> None:
        """Fill in log-probabilities of prompt positions: those of p come from the output at p - 1."""
        if not any(row.setup.prompt_logprobs != NO_LOGPROBS for row in work.rows):
            return
        counts = np.zeros(len(outcome.status), np.int32)
        places, tokens, widths = [], [], []
        for i, row in enumerate(work.rows):
            setup, start, count = row.setup, int(work.start[i]), int(work.count[i])
            if setup.prompt_logprobs == NO_LOGPROBS:
                continue
            low = max(setup.prompt_logprobs_from, 1, start + 1)
            high = min(start + count + 1, setup.prompt_len)
            if low < high:
                counts[work.lines[i]] = high - low
                places.append(np.arange(low, high) - 1 - start + int(work.ends[i]) - count)
                tokens.append(row.tokens[low:high])
                widths.append(np.full(high - low, setup.prompt_logprobs, np.int64))
        outcome.prompt_counts = counts
        outcome.prompt_logprobs = LogprobColumns.empty()
        if places:
            outcome.prompt_logprobs = self._score(hidden, *map(np.concatenate, (places, tokens, widths)))

    def _embed(self, work: _Work, hidden: Tensor, outcome: _Outcome) -> None:
        """Hand over the hidden states at the ends of prompts that are embedded."""
        ended = (work.start + work.count).tolist()
        asked = [i for i, row in enumerate(work.rows) if row.setup.embed and ended[i] == row.setup.prompt_len]
        if asked:
            picked = hidden.index_select(0, self._tensor(work.ends[asked] - 1)).float().cpu().numpy()
            outcome.embeddings = tuple(zip(work.lines[asked].tolist(), picked, strict=True))

    def _score(self, hidden: Tensor, places: LongArray, tokens: LongArray, widths: LongArray) -> LogprobColumns:
        parts = []
        for low in range(0, len(places), PROMPT_CHUNK):
            chunk = slice(low, low + PROMPT_CHUNK)
            logits = self._decoder.logits(hidden.index_select(0, self._tensor(places[chunk])))
            parts.append(tabulate(torch.log_softmax(logits, -1), tokens[chunk], widths[chunk]))
        return LogprobColumns.concat(parts)

    def _sample(self, plan: StepPlan, work: _Work, hidden: Tensor, outcome: _Outcome) -> None:
        chosen = np.flatnonzero(work.sample)
        if not len(chosen):
            return
        rows = [work.rows[i] for i in chosen.tolist()]
        lines, last = work.lines[chosen].astype(np.int64), work.ends[chosen] - 1
        positions = work.start[chosen] + work.count[chosen]
        whole = len(last) == len(hidden)
        logits = self._decoder.logits(hidden if whole else hidden.index_select(0, self._tensor(last)))
        raw = self._kept(logits, [row.raw_logprobs for row in rows])
        sampled = self._sampler.sample(logits, rows, positions, plan.masks)
        processed = self._kept(sampled.scores, [row.processed_logprobs for row in rows])
        for kept in (raw, processed):
            if kept is not None:
                self._tabulate(*kept, rows, lines, sampled, outcome)
        self._commit(rows, lines, positions, sampled, outcome)

    def _kept(self, logits: Tensor, asked: list[bool]) -> tuple[LongArray, Tensor] | None:
        """Return the rows that ask and their log-softmax."""
        picked = np.flatnonzero(asked)
        if not len(picked):
            return None
        part = logits if len(picked) == len(asked) else logits.index_select(0, self._tensor(picked))
        return picked, torch.log_softmax(part, -1)

    def _tabulate(
        self,
        picked: LongArray,
        values: Tensor,
        rows: Sequence[Row],
        lines: LongArray,
        sampled: Sampled,
        outcome: _Outcome,
    ) -> None:
        outcome.asked = True
        good = np.flatnonzero(sampled.valid[picked])
        if not len(good):
            return
        if len(good) < len(picked):
            values = values.index_select(0, self._tensor(good))
        picked = picked[good]
        widths = np.array([rows[i].setup.logprobs for i in picked.tolist()], np.int64)
        outcome.tables.append((lines[picked], tabulate(values, sampled.tokens[picked], widths)))

    def _commit(
        self, rows: Sequence[Row], lines: LongArray, positions: LongArray, sampled: Sampled, outcome: _Outcome
    ) -> None:
        """Write down the tokens, and end the rows that stop or have none."""
        for row, line, position, token, valid in zip(
            rows, lines.tolist(), positions.tolist(), sampled.tokens.tolist(), sampled.valid.tolist(), strict=True
        ):
            if not valid:
                row.dead = True
                outcome.status[line] = Status.NAN
                continue
            outcome.tokens[line], outcome.n_tokens[line] = token, 1
            row.append(token, position)
            self._processors.observe(row, token)
            if token in row.stop_set and position >= row.setup.min_len:
                row.dead = True
                outcome.status[line] = Status.STOP

    def _tensor(self, array: LongArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _result(plan: StepPlan, outcome: _Outcome, seconds: float) -> StepResult:
    logprobs = None
    if outcome.asked:
        place = np.cumsum(outcome.n_tokens, dtype=np.int64) - 1  # a line's place among the valid tokens
        logprobs = merge([(place[lines], table) for lines, table in outcome.tables], int(outcome.n_tokens.sum()))
    return StepResult(
        plan.step_id,
        plan.rows,
        plan.epoch,
        outcome.tokens[:, None],
        outcome.n_tokens,
        outcome.status,
        logprobs,
        outcome.prompt_counts,
        outcome.prompt_logprobs,
        device_ms=seconds * 1e3,
        embeddings=outcome.embeddings,
    )


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was computed."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that raised."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


def run_step(runner: Runner, plan: StepPlan) -> StepHandle:
    """Run a step now. What it raises comes out of the handle's ``result``."""
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            return _Done(runner.run(plan, began))
    except Exception as error:
        return Failed(error)
