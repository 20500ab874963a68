"""The state of running rows, as columns: what a row's occupant has computed, launched and may reach."""

from __future__ import annotations

import numpy as np

from slotline.plan import IntArray, LongArray
from slotline.sequence import Sequence
from slotline.slots import SlotTable


class RowTable:
    """Columns over ``max_slots`` rows.

    Attributes:
        slots: who sits where.
        tokens: [rows, max_len] known tokens.
        table: [rows, blocks] KV blocks in order; ``num_blocks`` of them are valid.
        known: tokens that are known: the prompt and what was committed.
        computed: positions whose step was committed.
        launched: positions whose step was launched.
        predicted: tokens that will be known once everything launched has been committed.
        target: positions that ever need computing (the last token of an answer never does).
        limit: longest the sequence may become.
        prompt_len: of which prompt.
        published: full blocks that were offered to the pool.
        last_step: newest launched step that names the row.
    """

    def __init__(self, max_slots: int, max_len: int, block_size: int) -> None:
        self.slots = SlotTable(max_slots)
        self.block_size = block_size
        self.tokens: IntArray = np.empty((max_slots, max_len), np.int32)
        self.table: IntArray = np.zeros((max_slots, -(-max_len // block_size)), np.int32)
        self.num_blocks: IntArray = np.zeros(max_slots, np.int32)
        self.known: IntArray = np.zeros(max_slots, np.int32)
        self.computed: IntArray = np.zeros(max_slots, np.int32)
        self.launched: IntArray = np.zeros(max_slots, np.int32)
        self.predicted: IntArray = np.zeros(max_slots, np.int32)
        self.target: IntArray = np.zeros(max_slots, np.int32)
        self.limit: IntArray = np.zeros(max_slots, np.int32)
        self.prompt_len: IntArray = np.zeros(max_slots, np.int32)
        self.published: IntArray = np.zeros(max_slots, np.int32)
        self.last_step: LongArray = np.zeros(max_slots, np.int64)
        self._order: LongArray = np.zeros((2, max_slots), np.int64)  # priority, seq_id
        self._sorted: IntArray | None = None  # occupied rows in order, while they stay the same

    # --- queries ----------------------------------------------------------------------

    def in_order(self) -> IntArray:
        """Return occupied rows, the one that goes first in front."""
        if self._sorted is None:
            rows = np.flatnonzero(self.slots.seq_id >= 0).astype(np.int32)
            priority, seq_id = self._order[:, rows]
            self._sorted = rows[np.lexsort((seq_id, priority))]
            self._sorted.flags.writeable = False
        return self._sorted

    def need(self, rows: IntArray) -> IntArray:
        """Return how many positions of each row can be launched now."""
        return np.minimum(self.predicted[rows], self.target[rows]) - self.launched[rows]

    def blocks(self, row: int) -> list[int]:
        """Return the row's KV blocks in order."""
        held: list[int] = self.table[row, : self.num_blocks[row]].tolist()
        return held

    # --- mutators ---------------------------------------------------------------------

    def seat(self, seq: Sequence, row: int, start: int, blocks: IntArray) -> None:
        """Put a sequence into a free row; positions below ``start`` are in its cached blocks."""
        self.slots.take(row, seq.seq_id)
        request, known = seq.request, len(seq.tokens)
        prompt_len = len(request.token_ids)
        self.table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.tokens[row, :known] = seq.tokens
        self.known[row] = self.predicted[row] = known
        self.launched[row] = self.computed[row] = start
        self.prompt_len[row] = prompt_len
        self.limit[row] = request.max_len
        self.target[row] = request.max_len - 1 if request.max_tokens else prompt_len
        self.published[row] = start // self.block_size
        self._order[:, row] = seq.order
        self._sorted = None
        seq.row = row

    def append_blocks(self, row: int, blocks: IntArray) -> None:
        """Add blocks to the end of the row's table."""
        have = int(self.num_blocks[row])
        self.table[row, have : have + len(blocks)] = blocks
        self.num_blocks[row] = have + len(blocks)

    def empty(self, row: int) -> None:
        """Free the row."""
        self.slots.free(row)
        self._sorted = None
        self.num_blocks[row] = 0

    # --- checks -----------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError if a row is ahead of itself or lacks blocks."""
        self.slots.check_integrity()
        free = self.slots.seq_id < 0
        assert not self.num_blocks[free].any(), "a free row holds blocks"
        for row in np.flatnonzero(~free).tolist():
            assert self.computed[row] <= self.launched[row] <= self.predicted[row], f"row {row} is ahead of itself"
            assert self.known[row] <= self.predicted[row] <= self.limit[row], f"row {row} is past its end"
            assert self.launched[row] <= self.num_blocks[row] * self.block_size, f"row {row} lacks blocks"
