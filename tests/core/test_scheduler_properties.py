"""The scheduler under random arrivals, aborts and tiny pools: the invariants hold and answers are exact."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotline import EngineConfig, SamplingParams
from slotline.blocks import BlockPool
from slotline.errors import OverloadError
from slotline.outputs import Finish
from slotline.queue import RequestQueue
from slotline.request import SequenceRequest
from slotline.scheduler import Scheduler
from slotline.testing.sim import SimBackend, sim_answer

VOCAB = 23
STOP = 5
MAX_LEN = 40


class FakeModel:
    context_length = MAX_LEN


class SchedulerMachine(RuleBasedStateMachine):
    depth = 1

    @initialize(
        slots=st.integers(1, 5),
        blocks=st.integers(10, 24),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        max_bypass=st.integers(1, 4),
        waits=st.lists(st.booleans(), min_size=1, max_size=4).filter(lambda waits: not all(waits)),
        tile=st.integers(1, 4),
    )
    def open(self, slots, blocks, budget, caching, max_bypass, waits, tile):
        self.backend = SimBackend(self.depth, VOCAB, waits=waits)
        info = self.backend.load(EngineConfig(kv_cache_tokens=blocks * 4, block_size=4), FakeModel())
        self.pool = BlockPool(info.num_blocks, info.block_size, prefix_caching=caching)
        self.queue = RequestQueue(slots + 6, max_bypass=max_bypass)
        self.scheduler = Scheduler(slots, MAX_LEN, budget, self.pool, self.queue, tile)
        self.budget = budget
        self.handles = deque()
        self.pages = deque()  # per launched step: which occupant names which block
        self.requests = {}
        self.answers = {}
        self.ended = {}
        self.aborted = set()
        self.next_id = 0
        self.waited = {}

    # --- what happens -----------------------------------------------------------------

    @rule(
        length=st.integers(1, 24),
        alphabet=st.integers(1, 3),
        data=st.data(),
        max_tokens=st.integers(0, 15),
        min_tokens=st.integers(0, 3),
        stops=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "a"]),
        count=st.integers(1, 3),
    )
    def arrive(self, length, alphabet, data, max_tokens, min_tokens, stops, priority, salt, count):
        prompt = data.draw(st.lists(st.integers(0, alphabet), min_size=length, max_size=length))
        group = []
        for j in range(count):
            group.append(
                SequenceRequest(
                    seq_id=self.next_id + j,
                    token_ids=np.array(prompt, np.int32),
                    params=SamplingParams(min_tokens=min_tokens).resolved({}),
                    seed=j,
                    stop_ids=(STOP,) if stops else (),
                    max_tokens=max_tokens,
                    priority=priority,
                    cache_salt=salt,
                    leader=self.next_id if j else None,
                )
            )
        before = len(self.queue), self.queue.live
        try:
            self.scheduler.add(group)
        except OverloadError:
            assert (len(self.queue), self.queue.live) == before
            return
        self.next_id += count
        for request in group:
            self.requests[request.seq_id] = request
            self.answers[request.seq_id] = []

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = seq_id not in self.ended and seq_id not in self.aborted
        assert self.scheduler.abort(seq_id) == was_live
        assert not self.scheduler.abort(seq_id)
        if was_live:
            self.aborted.add(seq_id)

    @rule()
    def launch(self):
        if len(self.handles) >= self.depth:
            return
        before = self.tables()
        plan = self.scheduler.schedule()
        assert self.tables() == before, "schedule() changed something"
        if plan is None:
            assert self.handles or not self.live(), "live sequences, nothing in flight, and no plan"
            self.backend.release(self.scheduler.take_ended())
            return
        self.check_plan(plan)
        self.scheduler.apply(plan)
        self.handles.append(self.backend.launch(plan))
        owners = zip(plan.rows.tolist(), plan.epoch.tolist(), strict=True)
        self.pages.append({block: owner for owner in owners for block in self.scheduler.rows.blocks(owner[0])})

    @rule()
    @precondition(lambda self: self.handles)
    def commit(self):
        batch = self.scheduler.commit(self.handles.popleft().result())
        self.pages.popleft()
        assert len(set(batch.seq_ids.tolist())) == len(batch.seq_ids)
        for seq_id, tokens, n, finish in zip(
            batch.seq_ids.tolist(), batch.tokens.tolist(), batch.n_tokens.tolist(), batch.finish.tolist(), strict=True
        ):
            assert seq_id not in self.ended, "news of a sequence that ended"
            assert seq_id not in self.aborted, "news of a sequence that was aborted"
            self.answers[seq_id] += tokens[:n]
            if finish:
                self.ended[seq_id] = finish

    # --- what must hold ---------------------------------------------------------------

    def live(self):
        return self.requests.keys() - self.ended.keys() - self.aborted

    def tables(self):
        counts = self.pool.counts()
        return counts, len(self.queue), self.scheduler.rows.slots.seq_id.tolist(), self.scheduler.rows.launched.tolist()

    def check_plan(self, plan):
        assert plan.num_tokens == plan.count.sum() <= max(self.budget, 1)
        assert len(plan) == len(set(plan.rows.tolist())) <= self.scheduler.rows.slots.max_slots
        assert (plan.count >= 1).all()
        for i, owner in enumerate(zip(plan.rows.tolist(), plan.epoch.tolist(), strict=True)):
            new = plan.block_ids[plan.block_indptr[i] : plan.block_indptr[i + 1]].tolist()
            hits = int(plan.start[i]) // self.pool.block_size if i >= len(plan) - len(plan.admitted) else 0
            for block in new[hits:]:
                for pages in self.pages:
                    assert pages.get(block, owner) == owner, f"block {block} changes hands while a step names it"

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    @invariant()
    def answers_are_exact(self):
        for seq_id, answer in getattr(self, "answers", {}).items():
            r = self.requests[seq_id]
            expected = sim_answer(r.token_ids.tolist(), r.seed, r.max_tokens, VOCAB, r.stop_ids, r.params.min_tokens)
            assert answer == expected[: len(answer)]
            if seq_id in self.ended:
                assert answer == expected
                stopped = bool(answer) and answer[-1] in r.stop_ids and len(answer) > r.params.min_tokens
                assert self.ended[seq_id] == (Finish.STOP if stopped else Finish.LENGTH)

    def teardown(self):
        """When arrivals and aborts stop, everything ends and everything comes back."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.live() and not self.handles:
                break
            while len(self.handles) < self.depth:
                n = len(self.handles)
                self.launch()
                if len(self.handles) == n:
                    break
            if self.handles:
                self.commit()
        assert not self.live(), "a sequence never ended"
        self.books_balance()
        self.answers_are_exact()
        assert self.scheduler.idle
        counts = self.pool.counts()
        assert counts.active == 0 and counts.free + counts.cached == counts.total
        assert self.queue.live == 0


class DeepSchedulerMachine(SchedulerMachine):
    depth = 2


class TestDepth1(SchedulerMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class TestDepth2(DeepSchedulerMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestDepth1Long(SchedulerMachine.TestCase):
    settings = settings(max_examples=5000, stateful_step_count=80, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestDepth2Long(DeepSchedulerMachine.TestCase):
    settings = settings(max_examples=5000, stateful_step_count=80, deadline=None)
