"""A backend without a model whose answers prove that the tables were right.

Its "KV cache" holds, for each position, a hash of all tokens up to it, computed from the hash
of the position before, which is read through the row's block table. A sampled token is taken
from that hash. So a stale page, a wrong block, a lost or doubled token changes the answer, and
``sim_answer`` says what the answer must be whatever the schedule was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from slotline.backend import ALL_PARAMS, BackendInfo, Capabilities
from slotline.plan import FEEDBACK, RowSetup, Status, StepPlan, StepResult

if TYPE_CHECKING:
    from slotline.config import EngineConfig
    from slotline.model import Model

MASK = (1 << 61) - 1
START = 7


def mix(before: int, token: int) -> int:
    """Return the hash of a prefix from that of the prefix one token shorter."""
    return ((before * 1_000_003) ^ (token + 1)) * 0x9E3779B1 & MASK


def sim_token(state: int, seed: int, vocab_size: int) -> int:
    """Return the token sampled after a prefix."""
    return (mix(state, seed) >> 20) % vocab_size


def sim_answer(
    prompt: Sequence[int],
    seed: int,
    max_tokens: int,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """Return what a sequence must answer, end token included."""
    state, answer = START, list[int]()
    for token in prompt:
        state = mix(state, token)
    while len(answer) < max_tokens:
        token = sim_token(state, seed, vocab_size)
        answer.append(token)
        if token in stop_ids and len(answer) > min_tokens:
            break
        state = mix(state, token)
    return answer


class SimRow:
    """One occupant of a row, as the device sees it."""

    def __init__(self, setup: RowSetup) -> None:
        self.setup = setup
        self.table: list[int] = []
        self.last = FEEDBACK
        self.dead = False
        self.computed = -1  # positions, once the first step said where it starts
        self.asked = 0  # for a token, this often


class SimHandle:
    """A step that was executed when it was launched; its result is fetched later."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        """Say that the step is over: it was when it was launched."""
        return True

    def result(self) -> StepResult:
        """Return the step's result."""
        return self._result


class SimBackend:
    """Execute plans on hashes instead of tensors, asserting that each is well-formed.

    Args:
        depth: pipeline depth to declare.
        vocab_size: number of tokens.
        nan_tokens: a row whose sampled token is one of these reports NAN instead.
        waits: whether a row waits when it is asked for a token, the first time, the second, and so on, over and over.
    """

    def __init__(
        self,
        depth: int = 1,
        vocab_size: int = 50,
        nan_tokens: frozenset[int] = frozenset(),
        waits: Sequence[bool] = (False,),
    ) -> None:
        self.depth = depth
        self.vocab_size = vocab_size
        self.nan_tokens = nan_tokens
        self.waits = waits
        self.rows: dict[int, SimRow] = {}
        self.plans: list[StepPlan] = []

    @property
    def capabilities(self) -> Capabilities:
        """Declare every sampling field, so that requests get here unchanged."""
        return Capabilities(params=ALL_PARAMS, pipeline_depth=self.depth, deterministic=True, block_sizes=(4, 8, 16))

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        """Allocate ``kv_cache_tokens`` (default 1024) positions."""
        self.block_size = config.block_size or 4
        num_blocks = (config.kv_cache_tokens or 1024) // self.block_size + 1
        self.cache = np.zeros((num_blocks, self.block_size), np.int64)
        return BackendInfo(
            num_blocks=num_blocks,
            block_size=self.block_size,
            bytes_per_block=8 * self.block_size,
            max_model_len=config.max_model_len or model.context_length,
            vocab_size=self.vocab_size,
        )

    def launch(self, plan: StepPlan) -> SimHandle:
        """Execute the step at once."""
        self.plans.append(plan)
        for row in plan.ended.tolist():
            self.rows.pop(row, None)
        for setup in plan.admitted:
            assert setup.row not in self.rows, f"row {setup.row} is admitted but was not ended"
            self.rows[setup.row] = SimRow(setup)
        self._append_blocks(plan)
        size = len(plan)
        tokens = np.full((size, 1), -1, np.int32)
        n_tokens, status = np.zeros(size, np.int32), np.zeros(size, np.int8)
        flat = np.concatenate([[0], np.cumsum(plan.count)])
        for i in range(size):
            ids = plan.token_ids[flat[i] : flat[i + 1]].tolist()
            tokens[i, 0], n_tokens[i], status[i] = self._run_row(plan, i, ids)
        return SimHandle(StepResult(plan.step_id, plan.rows, plan.epoch, tokens, n_tokens, status))

    def _append_blocks(self, plan: StepPlan) -> None:
        for i, row in enumerate(plan.rows.tolist()):
            assert self.rows[row].setup.epoch == plan.epoch[i], f"row {row} is planned with a stale epoch"
            self.rows[row].table += plan.block_ids[plan.block_indptr[i] : plan.block_indptr[i + 1]].tolist()

    def _run_row(self, plan: StepPlan, i: int, ids: list[int]) -> tuple[int, int, int]:
        row = self.rows[int(plan.rows[i])]
        if row.dead:
            return -1, 0, Status.DEAD
        start = int(plan.start[i])
        for position, given in enumerate(ids, start):
            token = row.last if given == FEEDBACK else given
            if given != FEEDBACK and position < len(row.setup.token_ids):
                assert given == row.setup.token_ids[position], "the plan's tokens are not the row's"
            self._write(row, position, token)
        position = start + len(ids)
        if row.computed < 0:
            row.computed = start
        if start > row.computed:  # it goes on from a token that did not come: what it has just written is wrong
            return -1, 0, Status.WAIT
        row.computed = position
        if not plan.sample[i]:
            return -1, 0, Status.OK
        row.asked += 1
        if self.waits[(row.asked - 1) % len(self.waits)]:
            row.computed -= 1
            return -1, 0, Status.WAIT
        token = sim_token(self._read(row, position - 1), row.setup.seed, self.vocab_size)
        if token in self.nan_tokens:
            row.dead = True
            return -1, 0, Status.NAN
        row.last = token
        row.dead = token in row.setup.stop_ids and position >= row.setup.min_len
        return token, 1, Status.STOP if row.dead else Status.OK

    def _read(self, row: SimRow, position: int) -> int:
        if position < 0:
            return START
        return int(self.cache[row.table[position // self.block_size], position % self.block_size])

    def _write(self, row: SimRow, position: int, token: int) -> None:
        block = row.table[position // self.block_size]
        users = sum(block in other.table for other in self.rows.values())
        assert block != 0 and users == 1, f"position {position} is written to block {block}, which {users} rows name"
        self.cache[block, position % self.block_size] = mix(self._read(row, position - 1), token)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self.rows.pop(row, None)

    def close(self) -> None:
        """Forget everything."""
        self.rows.clear()
