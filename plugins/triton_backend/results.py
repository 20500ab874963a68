"""What comes back of a launched step: words on their way to the host, and the StepResult they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slotline.plan import BoolArray, FloatArray, IntArray, LogprobColumns, LongArray, Status, StepPlan, StepResult
from slotline.plugins.triton_backend.sampling import Table, unpack


class Transfer:
    """Words on their way from the device to the host.

    Args:
        words: [N] int32; what is written there after this line does not matter.
    """

    def __init__(self, words: Tensor) -> None:
        if words.is_cuda:
            self._words = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
        else:
            self._words = words

    def read(self) -> IntArray:
        """Return the words; the copy must be done."""
        found: IntArray = self._words.numpy()
        return found


class Berth:
    """What one step in flight holds: memory that its words leave from and land in, and its clock.

    Args:
        sizes: words that leave and words that land at most.

    Attributes:
        free: no step holds it.
    """

    def __init__(self, device: torch.device, sizes: tuple[int, int]) -> None:
        self.free = True
        pinned = device.type == "cuda"
        self._out, self._in = (torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for size in sizes)
        self._out_words, self._in_words = self._out.numpy(), self._in.numpy()
        self._landed: IntArray | Transfer = self._in_words[:0]
        self._events: Any = None
        if pinned:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Take it for a step that begins now."""
        self.free = False
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """Note that everything of the step was launched."""
        if self._events is not None:
            self._events[1].record()

    def done(self) -> bool:
        """Tell whether everything of the step is over, for good or ill."""
        try:
            return self._events is None or bool(self._events[1].query())
        except RuntimeError:  # what the device failed with; `wait` raises it where it is expected
            return True

    def wait(self) -> float:
        """Wait for the end, the one wait of a step, and return the milliseconds from the beginning."""
        if self._events is None:
            return 0.0
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))

    def send(self, words: IntArray, target: Tensor) -> None:
        """Copy words to the front of a tensor on the device, without waiting."""
        count = len(words)
        self._out_words[:count] = words
        target[:count].copy_(self._out[:count], non_blocking=True)

    def receive(self, words: Tensor) -> None:
        """Start copying words from the device."""
        count = len(words)
        if count > len(self._in_words):
            self._landed = Transfer(words)
        else:
            self._in[:count].copy_(words, non_blocking=True)
            self._landed = self._in_words[:count]

    def landed(self) -> IntArray:
        """Return the words of `receive`, once the step was waited for; the next step overwrites them."""
        return self._landed.read() if isinstance(self._landed, Transfer) else self._landed


@dataclass(frozen=True, slots=True)
class PromptTables:
    """Logprobs of prompt positions on their way: of each row how many, and the parts that hold them."""

    counts: IntArray  # [R] in the plan's order
    tokens: LongArray  # [P]
    columns: int
    parts: list[tuple[int, Transfer]]  # (positions, words)

    def read(self) -> LogprobColumns:
        """Return all of them."""
        found, at = [], 0
        for count, words in self.parts:
            table, _ = unpack(words.read(), count, self.columns)
            found.append(tabulate(table, self.tokens[at : at + count], np.ones(count, np.bool_)))
            at += count
        return LogprobColumns.concat(found)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Outputs at the ends of prompts on their way: the plan's lines [E], and words of float32 [E, C]."""

    lines: list[int]
    words: Transfer

    def read(self) -> tuple[tuple[int, FloatArray], ...]:
        """Return all of them."""
        vectors = self.words.read().view(np.float32).reshape(len(self.lines), -1)
        return tuple(zip(self.lines, vectors, strict=True))


@dataclass(frozen=True, slots=True)
class Extras:
    """What some rows want of their prompts."""

    prompts: PromptTables | None = None
    embeddings: Embeddings | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """What was sampled, on its way.

    Attributes:
        lines: [R] the plan's lines that sample.
        size: rows that the words hold (see `sampling.choose`), R or more.
        columns: width of their tables, -1 = there are none.
        raw: [R] bool, whose logprobs are in the first table,
        processed: [R] bool, and in the second.
    """

    lines: LongArray
    size: int
    columns: int
    raw: BoolArray
    processed: BoolArray


class LaunchedStep:
    """A step that was launched; the StepHandle of the Triton backend.

    Args:
        refused: [R] bool, rows that a processor refused.
        finish: is told of (plan, lines, tokens, status) once, and may change the status in place.
    """

    def __init__(
        self,
        plan: StepPlan,
        berth: Berth,
        draws: Draws | None,
        extras: Extras,
        refused: BoolArray,
        finish: Callable[[StepPlan, LongArray, IntArray, IntArray], None],
    ) -> None:
        self._plan = plan
        self._berth = berth
        self._draws = draws
        self._extras = extras
        self._refused = refused
        self._finish = finish
        self._result: StepResult | None = None

    def ready(self) -> bool:
        """Tell, without waiting, whether the step is over."""
        return self._result is not None or self._berth.done()

    def result(self) -> StepResult:
        """Wait for the step and return what came of it."""
        if self._result is None:
            self._result = self._read()
            self._berth.free = True
        return self._result

    def _read(self) -> StepResult:
        milliseconds = self._berth.wait()
        plan, draws, prompts = self._plan, self._draws, self._extras.prompts
        count = len(plan)
        tokens, status = np.zeros(count, np.int32), np.zeros(count, np.int32)
        sampled = np.zeros(count, np.bool_)
        logprobs = None
        if draws is not None:
            words, n = self._berth.landed(), len(draws.lines)
            drawn, outcome = words[:n], words[draws.size : draws.size + n].copy()
            self._finish(plan, draws.lines, drawn, outcome)
            good = (outcome == Status.OK) | (outcome == Status.STOP)
            tokens[draws.lines], status[draws.lines], sampled[draws.lines] = np.where(good, drawn, 0), outcome, good
            logprobs = _logprobs(draws, words[2 * draws.size :], drawn, good)
        status[self._refused] = Status.NAN
        return StepResult(
            plan.step_id,
            plan.rows,
            plan.epoch,
            tokens[:, None],
            sampled.astype(np.int32),
            status.astype(np.int8),
            logprobs,
            None if prompts is None else prompts.counts,
            None if prompts is None else prompts.read(),
            device_ms=milliseconds,
            embeddings=() if self._extras.embeddings is None else self._extras.embeddings.read(),
        )


def _logprobs(draws: Draws, words: IntArray, tokens: IntArray, good: BoolArray) -> LogprobColumns | None:
    """Return one position for each good row, without values where it did not ask."""
    asked = draws.raw | draws.processed
    if draws.columns < 0 or not asked.any():
        return None
    table, rest = unpack(words, draws.size, draws.columns)
    keep = good & draws.raw
    lines = np.flatnonzero(good)
    if draws.processed.any():
        other, _ = unpack(rest, draws.size, draws.columns)
        mine = np.zeros(draws.size, np.bool_)
        mine[: len(good)] = draws.processed
        table = Table(
            np.where(mine, other.own, table.own),
            np.where(mine, other.ranks, table.ranks),
            np.where(mine, other.counts, table.counts),
            np.where(mine[:, None], other.ids, table.ids),
            np.where(mine[:, None], other.values, table.values),
        )
        keep = good & asked
    if len(lines) < draws.size:
        table = table.at(lines)
    return tabulate(table, tokens[lines].astype(np.int64), keep[lines])


def tabulate(table: Table, tokens: LongArray, keep: BoolArray) -> LogprobColumns:
    """Return one position per row of a table: the token that is there, then the best ones without it.

    Args:
        tokens: [M] the token that is there.
        keep: [M] whether the position gets values at all.
    """
    widest = int(table.counts[keep].max(initial=0))
    best, values = table.ids[:, :widest], table.values[:, :widest]
    places = np.arange(widest)
    wanted = (places < table.counts[:, None]) & (best != tokens[:, None]) & keep[:, None]
    own = np.isfinite(table.own) & keep
    wanted = np.concatenate([own[:, None], wanted], 1)
    ids = np.concatenate([tokens[:, None], best], 1)
    values = np.concatenate([table.own[:, None], values], 1)
    ranks = np.concatenate([table.ranks[:, None], np.broadcast_to(places + 1, best.shape)], 1)
    indptr = np.concatenate([[0], np.cumsum(wanted.sum(1))])
    return LogprobColumns(
        indptr.astype(np.int32),
        ids[wanted].astype(np.int32),
        values[wanted].astype(np.float32),
        ranks[wanted].astype(np.int32),
    )
