"""The scheduler: asks the planner for a step, carries it out on the tables, takes in its result.

``schedule()`` decides and changes nothing; ``apply()`` is the only place that carries a plan
out; ``commit()`` takes in a result. Rows are columns of numpy arrays, so that a steady decode
step costs a few array operations whatever the number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slotline.blocks import ROOT, BlockPool
from slotline.outputs import Finish, OutputBatch, collect_outputs
from slotline.plan import BoolArray, IntArray, Status, StepPlan, StepResult
from slotline.planner import Planner
from slotline.queue import RequestQueue
from slotline.request import SequenceRequest
from slotline.rows import RowTable
from slotline.sequence import NOWHERE, Sequence


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Run sequences through rows.

    Args:
        max_slots: rows.
        max_len: longest sequence in tokens.
        budget: tokens computed in one step.
        pool: the KV blocks.
        queue: the line.
        tile: tokens that a large step computes at a time.
    """

    def __init__(
        self, max_slots: int, max_len: int, budget: int, pool: BlockPool, queue: RequestQueue, tile: int = 1
    ) -> None:
        self.max_len = max_len
        self.pool = pool
        self.queue = queue
        self.rows = RowTable(max_slots, max_len, pool.block_size)
        self.running: dict[int, Sequence] = {}
        self.planner = Planner(budget, self.rows, pool, queue, self.running, tile)
        self.counts = SchedulerCounts()
        self.inflight: deque[StepPlan] = deque()
        self._ended: list[int] = []
        self._admitted: list[tuple[int, int]] = []  # (seq_id, cached tokens) not yet reported
        self._next_step = 1

    # --- queries ----------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Tell whether nothing waits, runs or is in flight."""
        return not self.inflight and not self.running and not len(self.queue)

    @property
    def longest(self) -> int:
        """Return the longest sequence, prompt and output, that can run at all."""
        return min(self.max_len, self.pool.capacity * self.pool.block_size)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing that can be launched now. Changes nothing."""
        return self.planner.plan(self._next_step, self._ended, self._oldest_step())

    def _oldest_step(self) -> int:
        return self.inflight[0].step_id if self.inflight else self._next_step

    # --- carry out --------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Carry out a plan that ``schedule`` has just returned; it counts as launched from here on."""
        rows = self.rows
        for row in plan.ended.tolist():
            if rows.slots.seq_id[row] >= 0:
                self._preempt(row)
        self._ended.clear()
        old = len(plan) - len(plan.admitted)
        for i in np.flatnonzero(np.diff(plan.block_indptr[: old + 1])).tolist():
            blocks = plan.block_ids[plan.block_indptr[i] : plan.block_indptr[i + 1]]
            self.pool.allocate(blocks.tolist())
            rows.append_blocks(int(plan.rows[i]), blocks)
        for i, setup in enumerate(plan.admitted, old):
            blocks = plan.block_ids[plan.block_indptr[i] : plan.block_indptr[i + 1]]
            self._seat(setup.row, int(plan.start[i]), blocks)
        rows.launched[plan.rows] = plan.start + plan.count
        rows.predicted[plan.rows] += plan.sample
        rows.last_step[plan.rows] = plan.step_id
        self.inflight.append(plan)
        self._next_step += 1
        self.counts.steps += 1
        self.counts.scheduled_tokens += plan.num_tokens

    def _seat(self, row: int, start: int, blocks: IntArray) -> None:
        """Move the next waiting sequence into its row, with the cached and new blocks of the plan."""
        seq = self.queue.pop()
        hits = start // self.pool.block_size
        self.pool.acquire(blocks[:hits].tolist())
        self.pool.allocate(blocks[hits:].tolist())
        self.rows.seat(seq, row, start, blocks)
        node = self.pool.node(int(blocks[hits - 1])) if hits else ROOT
        assert node is not None, f"block {blocks[hits - 1]} was found in the cache but has no content"
        seq.node, seq.published, seq.publishing = node, hits, True
        self.running[seq.seq_id] = seq
        if seq.reads_cache and self.pool.prefix_caching:
            self.counts.prefix_queried_tokens += len(seq.tokens)
            self.counts.prefix_hit_tokens += start
        if seq.cached_tokens is None:
            seq.cached_tokens = start
            self._admitted.append((seq.seq_id, start))

    def _preempt(self, row: int) -> None:
        seq = self.running[int(self.rows.slots.seq_id[row])]
        seq.tokens = self.rows.tokens[row, : self.rows.known[row]].copy()
        seq.preemptions += 1
        self.counts.preemptions += 1
        self._leave(seq)
        self.queue.requeue(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of its row and give its blocks back."""
        row = seq.row
        in_flight = self.planner.in_flight(row, self._oldest_step())
        self.pool.release(self.rows.blocks(row), after_step=int(self.rows.last_step[row]) if in_flight else None)
        self.rows.empty(row)
        seq.row = NOWHERE
        del self.running[seq.seq_id]

    # --- from outside -----------------------------------------------------------------

    def add(self, requests: Seq[SequenceRequest]) -> None:
        """Put new sequences in line, all or none.

        Raises:
            OverloadError: the queue's caps are reached.
        """
        self.queue.check(requests)
        self.queue.push([Sequence(r) for r in requests])

    def abort(self, seq_id: int) -> bool:
        """End a sequence wherever it is; False if it is not here any more."""
        waiting = self.queue.remove(seq_id)
        if waiting is not None:
            self.queue.finished(waiting)
            return True
        running = self.running.get(seq_id)
        if running is None:
            return False
        self._end(running)
        return True

    def take_ended(self) -> list[int]:
        """Return, once, the rows that ended since the last plan; for when no plan follows."""
        ended, self._ended = self._ended, []
        return ended

    def fail_inflight(self) -> list[int]:
        """Drop all launched steps; return the sequences in them, ended. Running others wait again.

        For when a step raised and the backend starts anew with an empty KV cache.
        """
        named = {(r, e) for p in self.inflight for r, e in zip(p.rows.tolist(), p.epoch.tolist(), strict=True)}
        last = self._next_step
        self.inflight.clear()
        self.pool.complete(last)
        failed = []
        for seq in list(self.running.values()):
            if (seq.row, int(self.rows.slots.epoch[seq.row])) in named:
                failed.append(seq.seq_id)
                self._end(seq)
            else:
                self._preempt(seq.row)
        self.pool.forget_cached()
        self._ended.clear()
        return failed

    def _end(self, seq: Sequence) -> None:
        self._ended.append(seq.row)
        self._leave(seq)
        self.queue.finished(seq)

    # --- take in ----------------------------------------------------------------------

    def commit(self, result: StepResult) -> OutputBatch:
        """Take in the result of the oldest launched step and return what it means for sequences."""
        plan = self.inflight.popleft()
        assert plan.step_id == result.step_id, f"step {result.step_id} came back, {plan.step_id} was launched first"
        rows, slots = plan.rows, self.rows.slots
        live = (slots.epoch[rows] == plan.epoch) & (slots.seq_id[rows] >= 0)
        live &= plan.start == self.rows.computed[rows]  # else it goes on from a token that did not come
        self.rows.computed[rows[live]] = (plan.start + plan.count)[live]
        if result.status.any():
            self._take_back(plan, live & (result.status == Status.WAIT))
        finish = self._take_tokens(result, rows, live)
        self._publish(rows[live])
        if result.prompt_counts is not None:
            self._count_prompt_positions(rows[live], result.prompt_counts[live])
        batch = collect_outputs(result, slots.seq_id[rows], live, finish, tuple(self._admitted))
        self._admitted.clear()
        for row in rows[finish > 0].tolist():
            self._end(self.running[int(slots.seq_id[row])])
        self.pool.complete(plan.step_id)
        return batch

    def _take_back(self, plan: StepPlan, waits: BoolArray) -> None:
        """Let rows that have no token yet compute their last position again; nothing launched after it counts."""
        table, at = self.rows, plan.rows[waits]
        table.computed[at] = table.launched[at] = (plan.start + plan.count)[waits] - 1
        table.predicted[at] = table.known[at]

    def _take_tokens(self, result: StepResult, rows: IntArray, live: BoolArray) -> IntArray:
        """Append sampled tokens and return [R] how each row ends with this step (0 = it goes on)."""
        table = self.rows
        got = live & (result.n_tokens > 0)
        everybody = bool(got.all())
        at, tokens = (rows, result.tokens[:, 0]) if everybody else (rows[got], result.tokens[got, 0])
        known = table.known[at]
        table.tokens[at, known] = tokens
        table.known[at] = known + 1
        self.counts.generated_tokens += len(at)
        finish = np.zeros(len(rows), np.int32)
        if everybody:
            finish[known + 1 >= table.limit[rows]] = Finish.LENGTH
        else:
            scored = live & (table.limit[rows] == table.prompt_len[rows]) & (table.computed[rows] >= table.target[rows])
            finish[(got & (table.known[rows] >= table.limit[rows])) | scored] = Finish.LENGTH
        if result.status.any():
            finish[got & (result.status == Status.STOP)] = Finish.STOP
            finish[live & (result.status == Status.NAN)] = Finish.NAN
        return finish

    def _publish(self, rows: IntArray) -> None:
        """Make blocks that are full now known to the pool."""
        size, table = self.pool.block_size, self.rows
        for row in rows[table.computed[rows] // size > table.published[rows]].tolist():
            seq = self.running[int(table.slots.seq_id[row])]
            full = int(table.computed[row]) // size
            table.published[row] = full
            salt, adapter = seq.request.cache_salt, seq.request.adapter
            while seq.publishing and seq.published < full:
                at = seq.published
                content = table.tokens[row, at * size : (at + 1) * size].tobytes()
                node = self.pool.publish(int(table.table[row, at]), seq.node, content, salt, adapter)
                if node is None:
                    seq.publishing = False
                else:
                    seq.node, seq.published = node, at + 1

    def _count_prompt_positions(self, rows: IntArray, counts: IntArray) -> None:
        for row, n in zip(rows.tolist(), counts.tolist(), strict=True):
            if n:
                self.running[int(self.rows.slots.seq_id[row])].prompt_delivered += n

    # --- checks -----------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, blocks, queue and rows do not agree."""
        self.rows.check_integrity()
        self.queue.check_integrity()
        slots = self.rows.slots
        self.pool.check_integrity([self.rows.blocks(r) for r in range(slots.max_slots)])
        seated = {s.row: s.seq_id for s in self.running.values()}
        occupied = np.flatnonzero(slots.seq_id >= 0)
        assert seated == dict(zip(occupied.tolist(), slots.seq_id[occupied].tolist(), strict=True)), "rows disagree"
        assert self.queue.live == len(self.queue) + len(self.running), "a sequence is neither waiting nor running"
