"""The slot table: which request sits in which row, and its epoch.

A row keeps its number while its occupants change; the epoch tells them apart, so that a result
that was launched for an earlier occupant is recognised and dropped.
"""

from __future__ import annotations

import heapq

import numpy as np

from slotline.plan import BoolArray, LongArray


class SlotTable:
    """``max_slots`` rows; a free row is taken lowest first."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.epoch: LongArray = np.zeros(max_slots, np.int64)
        self.seq_id: LongArray = np.full(max_slots, -1, np.int64)
        self._free = list(range(max_slots))

    @property
    def num_free(self) -> int:
        """Return the number of free rows."""
        return len(self._free)

    @property
    def num_occupied(self) -> int:
        """Return the number of rows with an occupant."""
        return self.max_slots - len(self._free)

    @property
    def occupied(self) -> BoolArray:
        """Return [max_slots] which rows have an occupant."""
        return self.seq_id >= 0

    def peek(self, count: int) -> list[int]:
        """Return the ``count`` rows that would be taken next."""
        return heapq.nsmallest(count, self._free)

    def take(self, row: int, seq_id: int) -> int:
        """Seat an occupant in a free row and return its epoch."""
        if row == self._free[0]:
            heapq.heappop(self._free)
        else:
            self._free.remove(row)
            heapq.heapify(self._free)
        self.seq_id[row] = seq_id
        return int(self.epoch[row])

    def free(self, row: int) -> None:
        """Empty a row; results for its last occupant are stale from here on."""
        assert self.seq_id[row] >= 0, f"row {row} is free already"
        self.seq_id[row] = -1
        self.epoch[row] += 1
        heapq.heappush(self._free, row)

    def check_integrity(self) -> None:
        """Raise AssertionError if free rows and occupants do not match."""
        free = set(self._free)
        assert len(free) == len(self._free), "a row is free twice"
        assert free == set(np.flatnonzero(self.seq_id < 0).tolist()), "free list and occupants disagree"
        seated = self.seq_id[self.seq_id >= 0]
        assert len(set(seated.tolist())) == len(seated), "a sequence sits in two rows"
