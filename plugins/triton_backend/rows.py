"""The rows: their state on the device, and what the host must know of them to plan a step's launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slotline.kernels import row_layout as layout
from slotline.kernels.note_tokens import note_tokens
from slotline.kernels.write_words import write_words
from slotline.params import SamplingParams
from slotline.plan import NO_LOGPROBS, IntArray, LongArray, RowSetup, StepPlan
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rows import Row, has_lists, penalised

_SETTINGS = np.dtype(
    [
        ("dead", "<i4"), ("last", "<i4"), ("temperature", "<f4"), ("log_min_p", "<f4"), ("top_p", "<f4"),
        ("top_k", "<i4"), ("seed", "<u8"), ("min_len", "<i4"), ("width", "<i4"), ("stops", "<i4"),
        ("stop_ids", "<i4", layout.MAX_STOPS.value),
        ("repetition", "<f4"), ("frequency", "<f4"), ("presence", "<f4"), ("seen", "<i4"),
    ]
)  # fmt: skip
SEEN_BYTES = 1 << 30  # that the table of seen tokens may take


def new_state(slots: int, longest: int, device: torch.device) -> Tensor:
    """Return the state of rows that nobody occupies yet, and the line of nobody behind them."""
    state = torch.zeros((slots + 1, layout.words(-(-longest // layout.PAGE))), dtype=torch.int32, device=device)
    state[-1, layout.DEAD.value] = 1
    state[-1, layout.WIDTH.value] = state[-1, layout.SEEN.value] = -1
    return state


def new_seen(slots: int, vocab: int, device: torch.device) -> Tensor | None:
    """Return the table of seen tokens; None where it would be too large."""
    if 4 * slots * vocab > SEEN_BYTES:
        return None
    return torch.zeros((slots, vocab), dtype=torch.int32, device=device)


class RowTable:
    """State of ``max_slots`` rows.

    Attributes:
        state: [slots + 1, words] int32 on the device, see `kernels.row_layout`; the last line is nobody's.
        seen: [slots, V] int32, how often each row had which token, see `kernels.note_tokens`; None where it would be
            too large: penalties are the host's to apply then.
        greedy, special, overflowing: [slots] bool: takes the best token; changes its logits in ways that the host must
            prepare; has more stop ids than the device looks at.
        adjusted: [slots] bool, has penalties or a minimum length, which the device applies; penalised: the former.
        processed: [slots] bool, wants logprobs of what is left after all changes.
        refused: [slots] bool, a logits processor refused its options.
        width, prompt_width: [slots] of the tables of logprobs, -1 = none.
        embeds: [slots] bool, wants the output at the end of its prompt.
        min_len: [slots] of which position the minimum length ends.
    """

    def __init__(self, state: Tensor, seen: Tensor | None, vocab: int, processors: Processors) -> None:
        slots = len(state) - 1
        self.state = state
        self.seen = seen
        self.greedy = np.ones(slots, np.bool_)
        self.adjusted = np.zeros(slots, np.bool_)
        self.penalised = np.zeros(slots, np.bool_)
        self.special = np.zeros(slots, np.bool_)
        self.processed = np.zeros(slots, np.bool_)
        self.overflowing = np.zeros(slots, np.bool_)
        self.refused = np.zeros(slots, np.bool_)
        self.width: IntArray = np.full(slots, -1, np.int32)
        self.prompt_width: IntArray = np.full(slots, -1, np.int32)
        self.min_len: LongArray = np.zeros(slots, np.int64)
        self.embeds = np.zeros(slots, np.bool_)
        self.setups: dict[int, RowSetup] = {}
        self.known: dict[int, Row] = {}  # rows whose tokens the host must follow
        self._epoch: LongArray = np.full(slots, -1, np.int64)
        self._pages: IntArray = np.zeros(slots, np.int32)
        self._vocab = vocab
        self._processors = processors

    def release(self, slots: Sequence[int]) -> None:
        """Forget rows."""
        for slot in slots:
            self.setups.pop(slot, None)
            row = self.known.pop(slot, None)
            if row is not None:
                self._processors.remove(row)

    def apply(self, plan: StepPlan) -> None:
        """Let rows in and out and extend their block tables, here and on the device.

        Raises:
            RuntimeError: the plan names another occupant than the one that was let in.
        """
        self.release(plan.ended.tolist())
        parts = [self._admit(setup) for setup in plan.admitted]
        if (self._epoch[plan.rows] != plan.epoch).any():
            raise RuntimeError("the plan names occupants of rows that were never let in")
        if len(plan.block_ids):
            parts.append(self._append_blocks(plan))
        if parts:
            places, values = (np.concatenate(columns).astype(np.int32) for columns in zip(*parts, strict=True))
            write_words(self.state, *columns_to_device(self.state.device, places, values))
        for setup in plan.admitted:
            if self.penalised[setup.row]:
                self._note(setup)

    def _append_blocks(self, plan: StepPlan) -> tuple[LongArray, IntArray]:
        """Return the words that extend block tables."""
        grown = np.diff(plan.block_indptr)
        first = self._pages[plan.rows]
        within = np.arange(len(plan.block_ids)) - np.repeat(plan.block_indptr[:-1], grown)
        line = np.repeat(plan.rows.astype(np.int64), grown) * self.state.shape[1]
        self._pages[plan.rows] += grown
        return line + layout.TABLE.value + np.repeat(first, grown) + within, plan.block_ids

    def _admit(self, setup: RowSetup) -> tuple[LongArray, IntArray]:
        """Take note of a new occupant, and return the words that set up its line."""
        slot, params = setup.row, setup.params
        self.release([slot])
        self.setups[slot] = setup
        self._epoch[slot], self._pages[slot] = setup.epoch, 0
        asks = setup.logprobs != NO_LOGPROBS
        self.greedy[slot] = params.greedy
        self.processed[slot] = asks and params.logprobs_mode == "processed"
        held = setup.min_len > setup.prompt_len
        self.overflowing[slot] = len(setup.stop_ids) > layout.MAX_STOPS.value
        on_host = has_lists(setup) or bool(held and self.overflowing[slot]) or (penalised(setup) and self.seen is None)
        self.special[slot] = on_host
        self.penalised[slot] = not on_host and penalised(setup)
        self.adjusted[slot] = not on_host and (held or penalised(setup))
        self.width[slot] = setup.logprobs if asks else -1
        self.prompt_width[slot] = setup.prompt_logprobs
        self.min_len[slot] = setup.min_len
        self.embeds[slot] = setup.embed
        self.refused[slot] = False
        if self.special[slot]:
            row = Row(setup, self._vocab, layout.PAGE)
            self.known[slot] = row
            self.refused[slot] = not self._processors.add(row)
        seen = slot if self.penalised[slot] else -1
        words = settings_of(setup, dead=bool(self.refused[slot]), seen=seen).view(np.int32)
        return slot * self.state.shape[1] + np.arange(len(words), dtype=np.int64), words

    def _note(self, setup: RowSetup) -> None:
        """Begin a row's line of seen tokens: its prompt's, and after a preemption those of its answer."""
        assert self.seen is not None
        self.seen[setup.row].zero_()
        for tokens, output in (
            (setup.token_ids[: setup.prompt_len], False),
            (setup.token_ids[setup.prompt_len :], True),
        ):
            if len(tokens):
                columns = columns_to_device(self.state.device, np.full(len(tokens), setup.row), tokens)
                note_tokens(self.seen, *columns, output=output)

    def adjusts(self, slots: IntArray, following: LongArray) -> bool:
        """Tell whether the device has logits to change for any of these rows."""
        rows = slots[self.adjusted[slots]]
        if not len(rows):
            return False
        return bool(self.penalised[rows].any() or (following[self.adjusted[slots]] < self.min_len[rows]).any())

    def specials(self, slots: IntArray, following: LongArray) -> list[tuple[int, Row]]:
        """Return the rows whose logits change, with their lines; a minimum length alone counts until it is reached."""
        lines = np.flatnonzero(self.special[slots] & ~self.refused[slots])
        rows = [(i, self.known[int(slots[i])]) for i in lines.tolist()]
        return [(i, row) for i, row in rows if row.adjusts or int(following[i]) < row.setup.min_len]

    def observe(self, slot: int, epoch: int, token: int, position: int) -> None:
        """Let the host's copy of a row know which token it sampled."""
        row = self.known.get(slot)
        if row is not None and row.setup.epoch == epoch:
            row.append(token, position)
            self._processors.observe(row, token)


def settings_of(setup: RowSetup, *, dead: bool, seen: int) -> np.ndarray:
    """Return the head of a row's line."""
    params: SamplingParams = setup.params
    line = np.zeros((), _SETTINGS)
    line["dead"] = dead
    line["temperature"] = 0.0 if params.greedy else params.temperature or 1.0
    line["log_min_p"] = math.log(params.min_p) if params.min_p else -math.inf
    line["top_p"] = 1.0 if params.top_p is None else params.top_p
    line["top_k"] = min(max(params.top_k or 0, 0), 2**31 - 1)
    line["seed"] = setup.seed
    line["min_len"] = setup.min_len
    line["width"] = -1 if setup.logprobs == NO_LOGPROBS else setup.logprobs
    line["repetition"] = params.repetition_penalty or 1.0
    line["frequency"], line["presence"] = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
    line["seen"] = seen
    stops = setup.stop_ids[: layout.MAX_STOPS.value]
    line["stops"] = len(stops)
    line["stop_ids"][: len(stops)] = stops
    return line.reshape(1)


def columns_to_device(device: torch.device, *columns: np.ndarray) -> list[Tensor]:
    """Copy int32 columns of equal length in one go, each to a multiple of 16 bytes, as compiled kernels expect."""
    count = len(columns[0])
    words = np.zeros((len(columns), -(-count // 4) * 4), np.int32)
    words[:, :count] = columns
    return [line[:count] for line in to_device(words, device)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting; what is in it may change afterwards."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
