"""Hand-made steps: drive a backend without an engine, and check every result it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotline.backend import Backend, BackendInfo, StepHandle
from slotline.params import SamplingParams
from slotline.plan import FEEDBACK, NO_LOGPROBS, IntArray, LogprobColumns, RowSetup, Status, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Work:
    """One row's part of a step: how many positions it computes, and whether it samples."""

    row: int
    count: int
    sample: bool = True


class StepDriver:
    """Keep the books that the scheduler would keep, and nothing else.

    ::

        driver.admit(0, [1, 2, 3], max_tokens=8)
        first = driver.step(Work(0, 3)).tokens[0, 0]      # the prompt
        second = driver.step(Work(0, 1)).tokens[0, 0]     # the token sampled before is fed back

    Every result goes through ``check_result``.
    """

    def __init__(self, backend: Backend, info: BackendInfo) -> None:
        self.backend = backend
        self.info = info
        self.setups: dict[int, RowSetup] = {}
        self._known: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._free = list(range(info.num_blocks - 1, 0, -1))  # block 0 is never handed out
        self._admitted: list[RowSetup] = []
        self._ended: list[int] = []
        self._epoch = 0
        self._step_id = 0

    def admit(
        self,
        row: int,
        token_ids: Sequence[int],
        *,
        output: Sequence[int] = (),
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
        logprobs: int = NO_LOGPROBS,
        prompt_logprobs: int = NO_LOGPROBS,
        embed: bool = False,
        **params: Any,
    ) -> RowSetup:
        """Let a sequence into a row with the next step; greedy unless ``temperature`` says otherwise.

        Args:
            token_ids: the prompt.
            output: what it had answered before a preemption.
        """
        self._epoch += 1
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, **{"temperature": 0, **params})
        setup = RowSetup(
            row=row,
            epoch=self._epoch,
            params=sampling.resolved({}),
            seed=seed,
            token_ids=_ints([*token_ids, *output]),
            prompt_len=len(token_ids),
            stop_ids=tuple(stop_ids),
            min_len=len(token_ids) + min_tokens,
            max_len=len(token_ids) + max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embed=embed,
        )
        self.setups[row] = setup
        self._known[row] = [*token_ids, *output]
        self._computed[row] = 0
        self._blocks[row] = []
        self._admitted.append(setup)
        return setup

    def tell(self, row: int, token_id: int) -> None:
        """Make a sampled token known, so that the next plan spells it out instead of feeding it back."""
        self._known[row].append(token_id)

    def end(self, *rows: int) -> None:
        """Take the occupants of ``rows`` out; the next plan says so."""
        self._forget(rows)
        self._ended += rows

    def release(self, *rows: int) -> None:
        """Take the occupants of ``rows`` out now, as the engine does when no plan follows."""
        self._forget(rows)
        self.backend.release(rows)

    def launch(self, *work: Work) -> tuple[StepPlan, StepHandle]:
        """Launch a step without fetching its result."""
        plan = self._plan(work)
        return plan, self.backend.launch(plan)

    def fetch(self, launched: tuple[StepPlan, StepHandle]) -> StepResult:
        """Fetch and check a launched step's result."""
        plan, handle = launched
        result = handle.result()
        assert not hasattr(handle, "ready") or handle.ready(), "a step whose result was fetched is over"
        setups = [self.setups.get(row) for row in plan.rows.tolist()]
        check_result(plan, result, setups, self.info.vocab_size)
        waits = result.status == Status.WAIT
        ends = (plan.start + plan.count)[waits].tolist()
        for row, epoch, end in zip(plan.rows[waits].tolist(), plan.epoch[waits].tolist(), ends, strict=True):
            if row in self.setups and self.setups[row].epoch == epoch:
                self._computed[row] = min(self._computed[row], end - 1)
        return result

    def step(self, *work: Work) -> StepResult:
        """Launch a step and return its checked result."""
        return self.fetch(self.launch(*work))

    def decode(self, row: int, steps: int) -> list[int]:
        """Compute all of the row's known tokens, then decode; return the tokens sampled."""
        sampled: list[int] = []
        while len(sampled) < steps:
            result = self.step(Work(row, max(len(self._known[row]) - self._computed[row], 1)))
            if result.status[0] != Status.WAIT:
                sampled.append(self._valid(result))
        return sampled

    @staticmethod
    def _valid(result: StepResult) -> int:
        assert result.n_tokens[0] > 0, f"nothing was sampled; status {Status(int(result.status[0])).name}"
        return int(result.tokens[0, 0])

    def _forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._free += reversed(self._blocks.pop(row, []))
            self.setups.pop(row, None)

    def _plan(self, work: Sequence[Work]) -> StepPlan:
        self._step_id += 1
        start = [self._computed[w.row] for w in work]
        tokens, blocks, indptr = [], [], [0]
        for w, first in zip(work, start, strict=True):
            known = self._known[w.row]
            tokens += [known[at] if at < len(known) else FEEDBACK for at in range(first, first + w.count)]
            blocks += self._grow(w.row, first + w.count)
            indptr.append(len(blocks))
            self._computed[w.row] = first + w.count
        plan = StepPlan(
            step_id=self._step_id,
            rows=_ints([w.row for w in work]),
            epoch=np.array([self.setups[w.row].epoch for w in work], np.int64),
            start=_ints(start),
            count=_ints([w.count for w in work]),
            token_ids=_ints(tokens),
            block_indptr=_ints(indptr),
            block_ids=_ints(blocks),
            sample=np.array([w.sample for w in work], np.bool_),
            admitted=tuple(self._admitted),
            ended=_ints(self._ended),
        )
        self._admitted, self._ended = [], []
        return plan

    def _grow(self, row: int, length: int) -> list[int]:
        """Return the blocks that the row needs to hold ``length`` tokens beyond those it has."""
        table = self._blocks[row]
        new = [self._free.pop() for _ in range(-(-length // self.info.block_size) - len(table))]
        table += new
        return new


def check_result(plan: StepPlan, result: StepResult, setups: Sequence[RowSetup | None], vocab_size: int) -> None:
    """Check that a result is well formed: its columns fit the plan and each other.

    Args:
        setups: the occupant of each row of the plan; None for one that has left meanwhile.

    Raises:
        AssertionError: saying what is wrong.
    """
    size = len(plan)
    assert result.step_id == plan.step_id, "step_id is not the plan's"
    assert np.array_equal(result.rows, plan.rows), "rows are not in the plan's order"
    assert np.array_equal(result.epoch, plan.epoch), "epochs are not the plan's"
    assert result.tokens.ndim == 2 and len(result.tokens) == size, f"tokens is not [R, T]: {result.tokens.shape}"
    assert result.n_tokens.shape == (size,) and result.status.shape == (size,), "n_tokens or status is not [R]"
    for i, setup in enumerate(setups):
        _check_row(plan, result, i, setup, vocab_size)
    asked = [s.logprobs if s is not None else None for s in setups]
    _check_logprobs(result, asked, vocab_size)
    _check_prompt_logprobs(plan, result, setups, vocab_size)
    ends = (plan.start + plan.count).tolist()
    wanted = [i for i, s in enumerate(setups) if s is not None and s.embed and ends[i] == s.prompt_len]
    assert [line for line, _ in result.embeddings] == wanted, "embeddings are not those of prompts that ended here"
    assert all(v.ndim == 1 and np.isfinite(v).all() for _, v in result.embeddings), "an embedding is no finite vector"


def _check_row(plan: StepPlan, result: StepResult, i: int, setup: RowSetup | None, vocab_size: int) -> None:
    sample = bool(plan.sample[i])
    status, n = Status(int(result.status[i])), int(result.n_tokens[i])
    tokens = result.tokens[i, :n].tolist()
    assert 0 <= n <= result.tokens.shape[1], f"n_tokens is {n}"
    assert not (n and not sample), "a row that does not sample has tokens"
    without = status in (Status.NAN, Status.DEAD, Status.WAIT)
    assert not (n and without), f"a row with status {status.name} has tokens"
    assert n or not sample or without, f"a row with status {status.name} has no token"
    assert sample or status != Status.WAIT, "a row that does not sample has nothing to wait for"
    assert all(0 <= token < vocab_size for token in tokens), f"tokens outside the vocabulary: {tokens}"
    if setup is not None and n:
        position = int(plan.start[i] + plan.count[i]) + n - 1
        ended = tokens[-1] in setup.stop_ids and position >= setup.min_len
        assert ended == (status == Status.STOP), f"the last token is {tokens[-1]}, the status {status.name}"


def _check_logprobs(result: StepResult, asked: Sequence[int | None], vocab_size: int) -> None:
    """``asked`` holds the width of each row; None where it is not known any more."""
    valid = result.n_tokens.tolist()
    if result.logprobs is None:
        wanting = [i for i, width in enumerate(asked) if width is not None and width >= 0 and valid[i]]
        assert not wanting, f"rows {wanting} asked for logprobs, and there are none"
        return
    assert len(result.logprobs) == sum(valid), "logprobs do not have one position per valid token"
    at = 0
    for i, width in enumerate(asked):
        for token in result.tokens[i, : valid[i]].tolist():
            if width is not None:
                _check_position(result.logprobs.slice(at, at + 1), token, width, vocab_size)
            at += 1


def _check_prompt_logprobs(
    plan: StepPlan, result: StepResult, setups: Sequence[RowSetup | None], vocab_size: int
) -> None:
    if result.prompt_counts is None:
        return
    counts = result.prompt_counts.tolist()
    columns = result.prompt_logprobs
    assert len(counts) == len(plan) and columns is not None, "prompt_counts is not [R], or has no prompt_logprobs"
    assert len(columns) == sum(counts), "prompt_logprobs do not have one position per count"
    at = 0
    for i, (setup, n) in enumerate(zip(setups, counts, strict=True)):
        if setup is not None and n:
            # Position p is scored by the logits of p - 1, so a step delivers what follows each position it computed.
            first = max(int(plan.start[i]) + 1, setup.prompt_logprobs_from)
            last = min(int(plan.start[i] + plan.count[i]) + 1, setup.prompt_len)
            assert setup.prompt_logprobs >= 0, "a row that did not ask has prompt logprobs"
            assert n == max(last - first, 0), f"{n} prompt positions were delivered, not {first} to {last}"
            for p in range(n):
                token = int(setup.token_ids[first + p])
                _check_position(columns.slice(at + p, at + p + 1), token, setup.prompt_logprobs, vocab_size)
        at += n


def _check_position(position: LogprobColumns, token: int, width: int, vocab_size: int) -> None:
    """Check one position: the token first, then the best ones in falling order."""
    ids, values, ranks = position.ids.tolist(), position.values, position.ranks.tolist()
    if width < 0:
        assert not ids, "a row that did not ask has logprobs"
        return
    assert ids and ids[0] == token, f"the first entry is not the token {token}: {ids}"
    assert len(ids) <= width + 1, f"{len(ids)} entries where {width} were asked for"
    assert len(set(ids)) == len(ids), f"a candidate is listed twice: {ids}"
    assert all(0 <= i < vocab_size for i in ids), f"candidates outside the vocabulary: {ids}"
    assert np.isfinite(values).all() and (values <= 0).all(), f"values that no logarithm of a probability has: {values}"
    assert (np.diff(values[1:]) <= 0).all(), f"alternatives are not in falling order: {values}"
    assert ranks[1:] == sorted(ranks[1:]) and min(ranks) >= 1, f"ranks are not in rising order from 1: {ranks}"
    if width:
        assert 1 in ranks, f"the most likely candidate is missing; ranks: {ranks}"


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)
