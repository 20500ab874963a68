"""Queue, slots and blocks, each on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from slotline import SamplingParams
from slotline.blocks import ROOT, BlockPool
from slotline.errors import ClientLimitExceeded, QueueFull
from slotline.logprobs import Logprobs
from slotline.plan import LogprobColumns, StepPlan, StepResult
from slotline.queue import RequestQueue
from slotline.request import SequenceRequest
from slotline.scheduler import Scheduler
from slotline.sequence import Sequence
from slotline.slots import SlotTable


def request(seq_id: int, priority: int = 0, length: int = 4, client: str | None = None) -> SequenceRequest:
    return SequenceRequest(
        seq_id=seq_id,
        token_ids=np.zeros(length, np.int32),
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
        max_tokens=4,
        priority=priority,
        client=client,
    )


def push(queue: RequestQueue, *requests: SequenceRequest) -> None:
    queue.check(requests)
    queue.push([Sequence(r) for r in requests])


def drain(queue: RequestQueue) -> list[int]:
    return [queue.pop().seq_id for _ in range(len(queue))]


# --- queue ----------------------------------------------------------------------------


def test_priority_then_arrival() -> None:
    queue = RequestQueue(10)
    push(queue, request(0, 1), request(1, 0), request(2, 1), request(3, 0))
    assert [s.seq_id for s in queue.in_order()] == [1, 3, 0, 2]
    assert drain(queue) == [1, 3, 0, 2]


def test_a_low_priority_request_is_overtaken_a_bounded_number_of_times() -> None:
    queue = RequestQueue(100, max_bypass=3)
    push(queue, request(0, 9), *(request(i, 0) for i in range(1, 10)))
    assert drain(queue) == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9]


def test_a_preempted_sequence_returns_to_its_place() -> None:
    queue = RequestQueue(10)
    push(queue, request(0), request(1), request(2))
    first = queue.pop()
    queue.requeue(first)
    assert drain(queue) == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(1, 5), st.data())
def test_in_order_is_what_pop_gives(arrivals, max_bypass, data) -> None:
    queue = RequestQueue(100, max_bypass=max_bypass)
    for seq_id, (priority, pop) in enumerate(arrivals):
        push(queue, request(seq_id, priority))
        if pop:
            queue.pop()
        if len(queue) and data.draw(st.booleans()):
            removed = data.draw(st.sampled_from([s.seq_id for s in queue.in_order()]))
            assert queue.remove(removed) is not None and queue.remove(removed) is None
    expected = [s.seq_id for s in queue.in_order()]
    assert len(expected) == len(queue)
    waited = 0
    while len(queue):
        oldest = min(s.seq_id for s in queue.in_order())
        popped = queue.pop().seq_id
        assert popped == expected.pop(0)
        waited = 0 if popped == oldest else waited + 1
        assert waited <= max_bypass
    assert not expected and queue.queued_tokens == 0


def test_caps_hold_for_whole_groups_and_a_refusal_changes_nothing() -> None:
    queue = RequestQueue(4, max_tokens=10, max_per_client=2)
    push(queue, request(0, client="a"), request(1, client="a"))
    before = (queue.live, queue.queued_tokens, len(queue))
    with pytest.raises(ClientLimitExceeded, match="max_queue_per_client"):
        queue.check([request(2, client="a")])
    with pytest.raises(QueueFull, match="max_queued_tokens"):
        queue.check([request(2, client="b")])
    with pytest.raises(QueueFull, match=r"max_slots \+ max_queue"):
        queue.check([request(i, length=0) for i in range(2, 5)])
    assert (queue.live, queue.queued_tokens, len(queue)) == before
    queue.finished(queue.pop())
    push(queue, request(5, client="a"))
    queue.check_integrity()


def test_a_prompt_larger_than_the_token_cap_may_wait_alone() -> None:
    queue = RequestQueue(4, max_tokens=10)
    push(queue, request(0, length=50))
    with pytest.raises(QueueFull):
        queue.check([request(1, length=1)])


# --- slots ----------------------------------------------------------------------------


def test_the_lowest_row_is_taken_and_epochs_tell_occupants_apart() -> None:
    slots = SlotTable(3)
    assert slots.peek(5) == [0, 1, 2]
    assert [slots.take(row, 10 + row) for row in slots.peek(3)] == [0, 0, 0]
    slots.free(1)
    slots.free(0)
    assert slots.peek(2) == [0, 1] and slots.num_free == 2
    assert slots.take(1, 20) == 1
    slots.check_integrity()
    with pytest.raises(AssertionError, match="free already"):
        slots.free(0)


# --- blocks ---------------------------------------------------------------------------


def content(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def fill(pool: BlockPool, *blocks_of_tokens: tuple[int, ...], salt: str | None = None) -> list[int]:
    """Allocate and publish a chain of full blocks."""
    ids = pool.peek(len(blocks_of_tokens), set())
    pool.allocate(ids)
    node: int | None = ROOT
    for block, tokens in zip(ids, blocks_of_tokens, strict=True):
        node = pool.publish(block, node, content(*tokens), salt, 0)
        assert node is not None
    return ids


def tokens(*blocks_of_tokens: tuple[int, ...]) -> np.ndarray:
    return np.array([t for block in blocks_of_tokens for t in block], np.int32)


A, B, C, D = (1, 2), (3, 4), (5, 6), (7, 8)


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5, 2)
    assert pool.capacity == pool.available == 4
    assert sorted(pool.peek(10, set())) == [1, 2, 3, 4]


def test_a_released_prefix_is_found_again_and_the_tail_goes_first() -> None:
    pool = BlockPool(4, 2)
    chain = fill(pool, A, B, C)
    pool.release(chain)
    assert pool.counts().cached == 3 and pool.lookup(tokens(A, B, C, D), None, 0) == chain
    assert pool.lookup(tokens(A, B, C), None, 0) == chain[:2], "one token has to be left to compute"
    assert pool.peek(1, set()) == [chain[2]], "the tail is evicted before what it hangs on"
    pool.allocate([chain[2]])
    assert pool.lookup(tokens(A, B, C, D), None, 0) == chain[:2]
    pool.check_integrity([[chain[2]]])


def test_salt_adapter_and_position_are_part_of_the_identity() -> None:
    pool = BlockPool(9, 2)
    chain = fill(pool, A, B, salt="x")
    assert pool.lookup(tokens(A, B, C), "x", 0) == chain
    assert pool.lookup(tokens(A, B, C), None, 0) == pool.lookup(tokens(A, B, C), "x", 1) == []
    assert pool.lookup(tokens(B, C), "x", 0) == [], "equal tokens behind another prefix"


def test_content_is_compared_even_if_hashes_collide(monkeypatch) -> None:
    class Colliding(bytes):
        def __hash__(self):
            return 1

    pool = BlockPool(9, 2)
    for block_tokens in (A, B, C):
        (block,) = pool.peek(1, set())
        pool.allocate([block])
        pool.publish(block, ROOT, Colliding(content(*block_tokens)), None, 0)
    keys = {hash(key[1]) for key in pool._index}
    assert keys == {1}
    found = [pool._index.get((ROOT, Colliding(content(*t)), None, 0)) for t in (A, B, C, D)]
    assert len(set(found[:3])) == 3 and found[3] is None


def test_a_shared_block_stays_active_until_its_last_user_leaves() -> None:
    pool = BlockPool(5, 2)
    chain = fill(pool, A, B)
    pool.acquire(chain)
    pool.release(chain)
    assert pool.counts().active == 2
    pool.release(chain)
    assert pool.counts() == (pool.counts().__class__)(4, 2, 0, 2)


def test_pending_blocks_wait_for_their_step_and_can_be_found_meanwhile() -> None:
    pool = BlockPool(4, 2)
    chain = fill(pool, A)
    (scratch,) = pool.peek(1, set())
    pool.allocate([scratch])
    pool.release([*chain, scratch], after_step=7)
    assert pool.available == 1 and pool.pending == 2
    pool.acquire(pool.lookup(tokens(A, B), None, 0))
    pool.complete(6)
    assert pool.available == 1
    pool.release(chain, after_step=9)
    pool.complete(7)
    assert pool.available == 2, "the block was used again: its first release does not count"
    pool.complete(9)
    assert pool.available == 3 and pool.counts().cached == 1
    pool.check_integrity([])


@pytest.mark.parametrize("room", [0, 1])
def test_a_parent_is_not_evicted_before_what_hangs_on_it(room: int) -> None:
    """Also where the child waits for a step when the parent's last user leaves."""
    pool = BlockPool(3 + room, 2)
    chain = fill(pool, A, B)
    pool.acquire(chain[:1])  # by a second sequence
    pool.release(chain, after_step=5)
    pool.release(chain[:1])
    assert pool.available == room and pool.pending == 2
    pool.allocate(pool.peek(room, set()))
    pool.complete(5)
    pool.check_integrity()
    assert pool.peek(2, set()) == [chain[1], chain[0]]
    assert pool.lookup(tokens(A, B, C), None, 0) == chain


def test_a_parent_that_came_back_first_goes_last() -> None:
    pool = BlockPool(4, 2)
    chain = fill(pool, A, B)
    pool.release(chain, after_step=5)
    pool.acquire(chain[:1])
    pool.complete(5)
    pool.release(chain[:1])
    assert pool.peek(3, set())[1:] == [chain[1], chain[0]]
    pool.check_integrity()


def carry_out(scheduler: Scheduler, plan: StepPlan) -> None:
    """Launch a step and commit it, each sampling row getting a token."""
    scheduler.apply(plan)
    count, one = len(plan), plan.sample.astype(np.int32)
    tokens, status = np.full((count, 1), 5, np.int32), np.zeros(count, np.int8)
    scheduler.commit(StepResult(plan.step_id, plan.rows, plan.epoch, tokens, one, status))


def plans(scheduler: Scheduler, most: int) -> Iterator[StepPlan]:
    """Carry out steps; yield their plans."""
    for _ in range(most):
        plan = scheduler.schedule()
        if plan is None:
            return
        carry_out(scheduler, plan)
        yield plan


@pytest.mark.parametrize(
    ("decoding", "prompts", "counts"),
    [
        (5, [9], [[7], [2]]),  # 14 tokens, of which 12 are whole tiles; then 7, and leaving 3 would leave all of it
        (5, [7], [[7]]),  # 12
        (5, [3], [[3]]),  # the tile would leave none of it
        (5, [4], [[3], [1]]),
        (5, [9, 1], [[7], [2, 1]]),  # the second waits for its turn, and the first is cut
        (5, [9, 4], [[9, 2], [2]]),
        (3, [9], [[9]]),  # few rows decode: the step takes what the weights take
        (4, [2], [[2]]),
    ],
)
def test_a_large_step_is_whole_tiles(decoding, prompts, counts) -> None:
    pool = BlockPool(200, 4)
    scheduler = Scheduler(16, 64, 64, pool, RequestQueue(32), tile=4)
    scheduler.add([replace(request(i, length=1), max_tokens=40) for i in range(decoding)])
    list(plans(scheduler, 1))
    scheduler.add([replace(request(100 + i, length=n), max_tokens=1) for i, n in enumerate(prompts)])
    found = [plan.count[decoding:].tolist() for plan in plans(scheduler, 4)]
    assert found == counts + [[]] * (4 - len(counts))
    scheduler.check_integrity()


def test_prompts_that_are_cut_go_on_in_order() -> None:
    """Chunks and admissions both: what is left over is a chunk of the next step."""
    scheduler = Scheduler(16, 64, 64, BlockPool(200, 4), RequestQueue(32), tile=8)
    scheduler.add([replace(request(i, length=1), max_tokens=60) for i in range(9)])
    list(plans(scheduler, 1))
    scheduler.add([replace(request(100 + i, length=n), max_tokens=2) for i, n in enumerate((30, 30, 3))])
    found = [(plan.num_tokens, plan.count[9:].tolist()) for plan in plans(scheduler, 3)]
    assert found == [(64, [30, 25]), (16, [1, 5, 1]), (12, [1, 2])]
    scheduler.check_integrity()


def test_a_row_that_makes_room_gives_its_tail_first() -> None:
    """The block that another row takes from it is not one that its cached blocks hang on."""
    pool, queue = BlockPool(5, 4), RequestQueue(9)
    scheduler = Scheduler(2, 64, 64, pool, queue)
    scheduler.add([replace(request(seq_id, length=length), max_tokens=20) for seq_id, length in ((0, 3), (1, 7))])
    taken: list[int] = []
    while not scheduler.counts.preemptions:
        plan = scheduler.schedule()
        assert plan is not None and plan.step_id < 20
        table = scheduler.rows.blocks(1)
        taken = plan.block_ids.tolist()
        carry_out(scheduler, plan)
    assert len(table) == 2 and taken == [table[1]] and pool.is_cached(table[0])
    scheduler.check_integrity()


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(5, 2)
    fill(pool, A)
    (other,) = pool.peek(1, set())
    pool.allocate([other])
    assert pool.publish(other, ROOT, content(*A), None, 0) is None
    pool.release([other])
    assert pool.counts().free == 3


def test_caching_can_be_off() -> None:
    pool = BlockPool(5, 2, prefix_caching=False)
    (block,) = pool.peek(1, set())
    pool.allocate([block])
    assert pool.publish(block, ROOT, content(*A), None, 0) is None
    assert pool.lookup(tokens(A, B), None, 0) == []


@pytest.mark.parametrize("damage", ["lost", "twice", "refs", "shared"])
def test_check_integrity_notices(damage: str) -> None:
    pool = BlockPool(5, 2)
    pool.allocate([1, 2])
    table = [[1, 2]]
    if damage == "lost":
        pool._free.popitem()
    elif damage == "twice":
        pool._free[1] = None
    elif damage == "refs":
        pool._refs[1] += 1
    else:
        pool._refs[1] += 1
        table = [[1, 2], [1]]
    with pytest.raises(AssertionError):
        pool.check_integrity(table)


# --- columns --------------------------------------------------------------------------


ENTRIES = st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 0, width=32)), max_size=4), max_size=8)


def table(rows) -> LogprobColumns:
    flat = [entry for row in rows for entry in row]
    indptr = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    ids, values = np.array([i for i, _ in flat], np.int32), np.array([v for _, v in flat], np.float32)
    return LogprobColumns(indptr, ids, values, ids)


@given(ENTRIES, st.data())
def test_columns_slice_and_join(rows, data) -> None:
    whole = table(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    edges = [0, *cuts, len(rows)]
    parts = [whole.slice(a, b) for a, b in pairwise(edges)]
    joined = LogprobColumns.concat(parts)
    for name in ("indptr", "ids", "values"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))


@given(st.lists(ENTRIES, min_size=1, max_size=3), st.lists(st.tuples(*[st.integers(0, 99)] * 3), max_size=6))
def test_logprobs_read_the_same_whatever_parts_they_are_in(steps, picks) -> None:
    """Positions of several steps' tables, one or many or none of each, with and without values."""
    tables, parts, expected = [table(rows) for rows in steps], [], []
    for which, begin, count in picks:
        rows = steps[which % len(steps)]
        start = begin % (len(rows) + 1)
        stop = min(len(rows), start + (1 if count < 60 else count % 4))
        parts.append((tables[which % len(steps)], start, stop))
        expected += [dict(row) or None for row in rows[start:stop]]
    read = Logprobs.of(parts, None)
    first = list(read)
    assert first == expected and len(read) == len(expected)
    for row in first:
        if row is not None:
            row.clear()  # it is the reader's own
    assert list(read) == expected == [read[i] for i in range(len(expected))] == list(read)
