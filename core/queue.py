"""The line: waiting sequences, in order of priority and arrival, under caps.

Lower priority values run first, equal ones in order of arrival. At most ``max_bypass``
admissions may overtake the one that has waited longest; then it goes next.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TypeVar

from slotline.errors import ClientLimitExceeded, QueueFull
from slotline.request import SequenceRequest
from slotline.sequence import Sequence

T = TypeVar("T", int, tuple[int, int])

RETRY_AFTER = 1.0  # seconds; clients are told to come back then


class RequestQueue:
    """Hold what waits; count what lives, per client too.

    Args:
        max_live: sequences that may wait or run at once.
        max_tokens: prompt tokens that may wait; None is no limit.
        max_per_client: sequences of one client that may wait or run; None is no limit.
        max_bypass: admissions that may overtake the longest waiting sequence.
    """

    def __init__(
        self, max_live: int, *, max_tokens: int | None = None, max_per_client: int | None = None, max_bypass: int = 256
    ) -> None:
        self.max_live = max_live
        self.max_tokens = max_tokens
        self.max_per_client = max_per_client
        self.max_bypass = max_bypass
        self.live = 0
        self.queued_tokens = 0
        self._clients: Counter[str] = Counter()
        self._waiting: dict[int, Sequence] = {}
        self._by_order: list[tuple[int, int]] = []  # heap of (priority, seq_id); stale entries are skipped
        self._by_age: list[int] = []  # heap of seq_id
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._waiting

    # --- queries ----------------------------------------------------------------------

    def check(self, group: Seq[SequenceRequest]) -> None:
        """Raise if the group may not come in; it comes in whole or not at all.

        Raises:
            QueueFull: the engine's caps are reached.
            ClientLimitExceeded: the client's cap is reached.
        """
        self._check_client(group)
        if self.live + len(group) > self.max_live:
            raise QueueFull(
                f"{self.live} sequences are live and {len(group)} more were asked for; the limit is {self.max_live} "
                "(max_slots + max_queue). Try again later",
                retry_after=RETRY_AFTER,
            )
        tokens = sum(len(r.token_ids) for r in group)
        if self.max_tokens is not None and self._waiting and self.queued_tokens + tokens > self.max_tokens:
            raise QueueFull(
                f"{self.queued_tokens} prompt tokens wait and {tokens} more were asked for; the limit is "
                f"{self.max_tokens} (max_queued_tokens). Try again later",
                retry_after=RETRY_AFTER,
            )

    def _check_client(self, group: Seq[SequenceRequest]) -> None:
        if self.max_per_client is None:
            return
        for client, count in Counter(r.client for r in group if r.client is not None).items():
            if self._clients[client] + count > self.max_per_client:
                raise ClientLimitExceeded(
                    f"client {client!r} has {self._clients[client]} sequences and asked for {count} more; the limit "
                    f"is {self.max_per_client} (max_queue_per_client). Wait for some to finish",
                    retry_after=RETRY_AFTER,
                )

    def in_order(self) -> Iterator[Sequence]:
        """Yield waiting sequences in the order in which ``pop`` would give them."""
        oldest, normal = self._walk_age(), self._walk_order()
        overtaken, given = self._overtaken, set[int]()
        first = next(oldest, None)
        while first is not None:
            while first is not None and first in given:
                first, overtaken = next(oldest, None), 0
            if first is None:
                return
            seq_id = first
            if overtaken < self.max_bypass:
                seq_id = next(i for i in normal if i not in given)
            overtaken = 0 if seq_id == first else overtaken + 1
            given.add(seq_id)
            yield self._waiting[seq_id]

    def peek(self) -> Sequence | None:
        """Return the sequence that goes next."""
        return next(self.in_order(), None)

    def _walk_order(self) -> Iterator[int]:
        return (seq_id for _, seq_id in _sorted_heap(self._by_order) if seq_id in self._waiting)

    def _walk_age(self) -> Iterator[int]:
        return (seq_id for seq_id in _sorted_heap(self._by_age) if seq_id in self._waiting)

    # --- mutators ---------------------------------------------------------------------

    def push(self, group: Seq[Sequence]) -> None:
        """Take in new sequences; call ``check`` first."""
        for seq in group:
            self.live += 1
            if seq.request.client is not None:
                self._clients[seq.request.client] += 1
            self._enqueue(seq)

    def requeue(self, seq: Sequence) -> None:
        """Take back a preempted sequence, at its old place."""
        self._enqueue(seq)

    def pop(self) -> Sequence:
        """Take out the sequence that goes next."""
        seq = self.peek()
        if seq is None:
            raise IndexError("the queue is empty")
        oldest = next(self._walk_age())
        self._overtaken = 0 if seq.seq_id == oldest else self._overtaken + 1
        self._drop(seq.seq_id)
        return seq

    def remove(self, seq_id: int) -> Sequence | None:
        """Take out one sequence wherever it stands; None if it does not wait."""
        if seq_id not in self._waiting:
            return None
        if seq_id == next(self._walk_age()):
            self._overtaken = 0
        return self._drop(seq_id)

    def finished(self, seq: Sequence) -> None:
        """Count a sequence as gone, from wherever it was."""
        self.live -= 1
        client = seq.request.client
        if client is not None:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def _enqueue(self, seq: Sequence) -> None:
        self._waiting[seq.seq_id] = seq
        self.queued_tokens += len(seq.tokens)
        heapq.heappush(self._by_order, seq.order)
        heapq.heappush(self._by_age, seq.seq_id)

    def _drop(self, seq_id: int) -> Sequence:
        seq = self._waiting.pop(seq_id)
        self.queued_tokens -= len(seq.tokens)
        while self._by_order and self._by_order[0][1] not in self._waiting:
            heapq.heappop(self._by_order)
        while self._by_age and self._by_age[0] not in self._waiting:
            heapq.heappop(self._by_age)
        return seq

    def check_integrity(self) -> None:
        """Raise AssertionError if the counts do not match what waits."""
        assert self.queued_tokens == sum(len(s.tokens) for s in self._waiting.values()), "queued tokens are off"
        assert len(self._waiting) <= self.live <= self.max_live, "live sequences are off"
        assert {s for _, s in self._by_order} >= self._waiting.keys(), "a waiting sequence is in no heap"
        assert all(count > 0 for count in self._clients.values()), "a client has no sequences but is counted"


def _sorted_heap(heap: list[T]) -> Iterator[T]:
    """Yield a heap's items in order without changing it; k items cost O(k log k)."""
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        item, at = heapq.heappop(frontier)
        yield item
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
