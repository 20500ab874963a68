"""The policy: which rows compute which tokens in the next step. It reads tables and changes nothing.

The order within a step: rows that decode (one token each), rows with prompt left (a chunk),
then new rows from the queue, all under one token budget. The row that comes first always gets
at least one token. Where blocks run out, the row that would go last gives up its row and blocks
and computes them again later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from slotline.blocks import BlockPool
from slotline.plan import FEEDBACK, NO_LOGPROBS, IntArray, RowSetup, StepPlan
from slotline.queue import RequestQueue
from slotline.rows import RowTable
from slotline.sequence import Sequence

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that comes in: its row, the cached blocks it starts from, its first chunk."""

    seq: Sequence
    row: int
    hits: list[int]
    count: int


@dataclass(slots=True)
class Work:
    """A decision in the making."""

    budget: int  # tokens left
    blocks: int  # that can still be allocated
    decode: IntArray = field(default_factory=lambda: NO_ROWS)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (row, tokens)
    admissions: list[Admission] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    short: bool = False  # a row has to wait for blocks


class Planner:
    """Decide the next step over a queue, a row table and a block pool.

    Args:
        budget: tokens computed in one step.
        running: sequences in rows, by number.
        tile: tokens that a large step computes at a time.
    """

    def __init__(
        self,
        budget: int,
        rows: RowTable,
        pool: BlockPool,
        queue: RequestQueue,
        running: Mapping[int, Sequence],
        tile: int = 1,
    ) -> None:
        self.budget = budget
        self.tile = tile
        self.rows = rows
        self.pool = pool
        self.queue = queue
        self.running = running

    def plan(self, step_id: int, ended: list[int], oldest_step: int) -> StepPlan | None:
        """Return the next step, or None if nothing can be launched now.

        Args:
            ended: rows to tell the backend of.
            oldest_step: the oldest step in flight, or one that is higher than any.
        """
        if not self.running and not len(self.queue):
            return None
        work = Work(self.budget, self.pool.available)
        rows = self.rows.in_order()
        need = self.rows.need(rows)
        reserve = 1 if len(need) and need[0] > 1 else 0
        decode = rows[need == 1][: max(work.budget - reserve, 0)]
        work.decode = self._with_blocks(work, decode, rows, oldest_step)
        work.budget -= len(work.decode)
        self._plan_chunks(work, rows[need > 1].tolist(), need[need > 1].tolist())
        if not work.short and not work.preempted:
            self._plan_admissions(work)
        self._fill_tiles(work)
        if not (len(work.decode) or work.chunks or work.admissions):
            return None
        return self._build(work, step_id, ended, oldest_step)

    # --- rows that run ----------------------------------------------------------------

    def _with_blocks(self, work: Work, decode: IntArray, rows: IntArray, oldest_step: int) -> IntArray:
        """Return the rows that have, or can get, the block they write to; choose who makes room."""
        wants = self.rows.launched[decode] // self.pool.block_size >= self.rows.num_blocks[decode]
        wanted = int(np.count_nonzero(wants))
        if wanted <= work.blocks:
            work.blocks -= wanted
            return decode
        kept, victims, coming = [], rows.tolist(), self.pool.pending
        for row, want in zip(decode.tolist(), wants.tolist(), strict=True):
            if row in work.preempted:
                continue
            while want and work.blocks < 1 and coming < 1 and victims[-1] != row:
                victim = victims.pop()
                work.preempted.append(victim)
                own = len(self._own_blocks(victim))
                if self.in_flight(victim, oldest_step):
                    coming += own
                else:
                    work.blocks += own
            if want and work.blocks < 1:  # wait for blocks that steps in flight still use
                work.short = True
                coming -= 1
                continue
            work.blocks -= bool(want)
            kept.append(row)
        return np.array(kept, np.int32)

    def in_flight(self, row: int, oldest_step: int) -> bool:
        """Tell whether a launched step still names the row."""
        return int(self.rows.last_step[row]) >= oldest_step

    def _own_blocks(self, row: int) -> list[int]:
        return [b for b in self.rows.blocks(row) if self.pool.refs(b) == 1]

    def _plan_chunks(self, work: Work, rows: list[int], need: list[int]) -> None:
        """Give what is left of the budget to prompts; their blocks were allocated on admission."""
        for row, wanted in zip(rows, need, strict=True):
            if work.budget <= 0:
                return
            if row not in work.preempted:
                count = min(wanted, work.budget)
                work.chunks.append((row, count))
                work.budget -= count

    # --- rows that come in ------------------------------------------------------------

    def _plan_admissions(self, work: Work) -> None:
        """Let waiting sequences in while rows, blocks and budget last; nobody is passed over.

        All blocks for the known tokens are taken at once, and one for each running row to grow
        into is left, so that a new row does not push out another in the next step.
        """
        slots = self.rows.slots
        if work.budget <= 0 or not slots.num_free or not len(self.queue):
            return
        spare, claimed = slots.num_occupied, set[int]()
        wanted = min(slots.num_free, len(self.queue))
        for row, seq in zip(slots.peek(wanted), self.queue.in_order(), strict=False):
            request = seq.request
            hits = self.pool.lookup(seq.tokens, request.cache_salt, request.adapter) if seq.reads_cache else []
            revived = {b for b in hits if self.pool.is_cached(b)} - claimed
            cost = -(-len(seq.tokens) // self.pool.block_size) - len(hits) + len(revived)
            if work.budget <= 0 or cost + spare > work.blocks or self._should_wait(seq, work):
                return
            count = min(len(seq.tokens) - len(hits) * self.pool.block_size, work.budget)
            work.admissions.append(Admission(seq, row, hits, count))
            work.budget -= count
            work.blocks -= cost
            claimed |= revived
            spare += 1

    def _should_wait(self, seq: Sequence, work: Work) -> bool:
        """Tell whether the blocks to start from are being computed right now, by another choice of the request."""
        leader, blocks = seq.request.leader, (len(seq.request.token_ids) - 1) // self.pool.block_size
        if leader is None or not blocks or not self.pool.prefix_caching:
            return False
        if any(a.seq.seq_id == leader for a in work.admissions):
            return True
        running = self.running.get(leader)
        return running is not None and running.publishing and running.published < blocks

    # --- whole tiles ------------------------------------------------------------------

    def _fill_tiles(self, work: Work) -> None:
        """Leave to the next step what would only begin another tile, unless it is most of the prompts' tokens.

        A step with a tile of rows that decode is followed by another, which has room for it. In smaller steps nobody
        waits: they take as long as reading the weights does, whatever they compute.
        """
        prompts = sum(count for _, count in work.chunks) + sum(a.count for a in work.admissions)
        excess = (len(work.decode) + prompts) % self.tile
        if len(work.decode) < self.tile or 2 * excess > prompts:
            return
        while excess and work.admissions:
            last = work.admissions.pop()
            if last.count > excess:
                work.admissions.append(replace(last, count=last.count - excess))
            excess -= min(last.count, excess)
        while excess:
            row, count = work.chunks.pop()
            if count > excess:
                work.chunks.append((row, count - excess))
            excess -= min(count, excess)

    # --- columns ----------------------------------------------------------------------

    def _build(self, work: Work, step_id: int, ended: list[int], oldest_step: int) -> StepPlan:
        """Put the decision into columns: decoding rows, chunks, new rows."""
        if not (work.chunks or work.admissions or work.preempted):
            return self._build_decoding(work.decode, step_id, ended)
        table, new = self.rows, work.admissions
        old = np.concatenate([work.decode, np.array([r for r, _ in work.chunks], np.int32)])
        rows = np.concatenate([old, np.array([a.row for a in new], np.int32)])
        count = np.ones(len(rows), np.int32)
        count[len(work.decode) :] = [c for _, c in work.chunks] + [a.count for a in new]
        start = np.concatenate([table.launched[old], np.array([len(a.hits) for a in new], np.int32) * table.block_size])
        goal = np.concatenate([table.predicted[old], np.array([len(a.seq.tokens) for a in new], np.int32)])
        limit = np.concatenate([table.limit[old], np.array([a.seq.request.max_len for a in new], np.int32)])
        indptr, blocks = self._assign_blocks(work, old, oldest_step)
        return StepPlan(
            step_id=step_id,
            rows=rows,
            epoch=table.slots.epoch[rows],
            start=start,
            count=count,
            token_ids=self._flat_tokens(work),
            block_indptr=indptr,
            block_ids=blocks,
            sample=(start + count == goal) & (goal < limit),
            admitted=tuple(self._setup(a.seq, a.row) for a in new),
            ended=np.array(ended + work.preempted, np.int32),
        )

    def _build_decoding(self, rows: IntArray, step_id: int, ended: list[int]) -> StepPlan:
        """Do what `_build` does for rows with one token each, the steady state, in fewer operations."""
        table, count = self.rows, len(rows)
        start, goal = table.launched[rows], table.predicted[rows]
        wants = start // table.block_size >= table.num_blocks[rows]
        indptr, blocks = np.zeros(count + 1, np.int32), NO_ROWS
        if wants.any():
            np.cumsum(wants, out=indptr[1:])
            blocks = np.array(self.pool.peek(int(indptr[-1]), set(), []), np.int32)
        tokens = np.full(count, FEEDBACK, np.int32)
        known = np.flatnonzero(start < table.known[rows])
        if len(known):
            tokens[known] = table.tokens[rows[known], start[known]]
        return StepPlan(
            step_id=step_id,
            rows=rows,
            epoch=table.slots.epoch[rows],
            start=start,
            count=np.ones(count, np.int32),
            token_ids=tokens,
            block_indptr=indptr,
            block_ids=blocks,
            sample=(start + 1 == goal) & (goal < table.limit[rows]),
            ended=np.array(ended, np.int32),
        )

    def _assign_blocks(self, work: Work, old: IntArray, oldest_step: int) -> tuple[IntArray, IntArray]:
        """Return (indptr [R + 1], ids) of the blocks each row appends, cached ones first."""
        size = self.pool.block_size
        widths = np.zeros(len(old) + len(work.admissions), np.int32)
        decode = work.decode
        widths[: len(decode)] = self.rows.launched[decode] // size >= self.rows.num_blocks[decode]
        grown = int(widths.sum())
        fresh = [-(-len(a.seq.tokens) // size) - len(a.hits) for a in work.admissions]
        claimed = {b for a in work.admissions for b in a.hits}
        # The tail of a row first, as when it is released: nothing may lose what it hangs on.
        freed = [b for r in work.preempted if not self.in_flight(r, oldest_step) for b in reversed(self._own_blocks(r))]
        ids = self.pool.peek(grown + sum(fresh), claimed, freed)
        at = grown
        appended = ids[:grown]
        for i, (admission, n) in enumerate(zip(work.admissions, fresh, strict=True), len(old)):
            appended += admission.hits + ids[at : at + n]
            at += n
            widths[i] = len(admission.hits) + n
        indptr = np.zeros(len(widths) + 1, np.int32)
        np.cumsum(widths, out=indptr[1:])
        return indptr, np.array(appended, np.int32)

    def _flat_tokens(self, work: Work) -> IntArray:
        """Return [T] the tokens to compute; FEEDBACK where the last one is still in flight."""
        table, decode = self.rows, work.decode
        at = table.launched[decode]
        single = np.where(at < table.known[decode], table.tokens[decode, at], np.int32(FEEDBACK))
        parts = [single]
        for row, count in work.chunks:
            first = int(table.launched[row])
            parts.append(table.tokens[row, first : first + count])
        for a in work.admissions:
            first = len(a.hits) * self.pool.block_size
            parts.append(a.seq.tokens[first : first + a.count])
        return np.concatenate(parts) if len(parts) > 1 else single

    def _setup(self, seq: Sequence, row: int) -> RowSetup:
        request = seq.request
        prompt_len = len(request.token_ids)
        return RowSetup(
            row=row,
            epoch=int(self.rows.slots.epoch[row]),
            params=request.params,
            seed=request.seed,
            token_ids=seq.tokens,
            prompt_len=prompt_len,
            stop_ids=request.stop_ids,
            bad_words=request.bad_words,
            min_len=prompt_len + (request.params.min_tokens or 0),
            max_len=request.max_len,
            adapter=request.adapter,
            logprobs=NO_LOGPROBS if request.logprobs is None else request.logprobs,
            prompt_logprobs=NO_LOGPROBS if request.prompt_logprobs is None else request.prompt_logprobs,
            prompt_logprobs_from=seq.prompt_delivered,
            embed=request.embed,
        )
