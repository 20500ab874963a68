"""From logits to tokens and their logprobs on the device, packed into one array of words for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from slotline.kernels.argmax import argmax
from slotline.kernels.drop_rest import drop_rest
from slotline.kernels.finish_rows import finish_rows
from slotline.kernels.hold_stops import hold_stops
from slotline.kernels.note_tokens import note_tokens
from slotline.kernels.penalise import penalise
from slotline.kernels.results import TopLogprobs
from slotline.kernels.row_settings import RowSettings, row_settings
from slotline.kernels.sample import sample
from slotline.kernels.top_logprobs import top_logprobs
from slotline.plan import BoolArray, FloatArray, IntArray, LongArray, MaskHandle, Status
from slotline.plugins.torch_backend.adjusting import adjust, apply_masks
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rows import Row
from slotline.plugins.triton_backend.rows import RowTable, columns_to_device, to_device

COLUMNS = 20  # of the table of logprobs that is made in passing
WIDE = 1024  # of the table that is made for rows that want more


class Kind(Enum):
    """What the rows of a step need of sampling."""

    GREEDY = "greedy"
    DRAW = "draw"
    LOGPROBS = "logprobs"  # some of them
    ADJUSTED = "adjusted"  # some have penalties or a minimum length, and some may want logprobs


def choose(
    kind: Kind, logits: Tensor, state: Tensor, slots: Tensor, following: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Sample rows whose logits nothing changes but penalties and a minimum length, and note the outcome.

    Args:
        logits: [R, V] float32.
        state: [S, W] the row state.
        slots, following: [R] int32, each row's line and the position of the token that is sampled.
        seen: [S, V] int32 the table of seen tokens, if there is one.

    Returns:
        The words of tokens [R] and status [R], and of a table of logprobs (see `pack`) if the kind has one.
    """
    if kind is Kind.GREEDY:
        tokens, found = argmax(logits)
        return torch.cat([tokens, finish_rows(state, slots, following, tokens, found)])
    settings, raw = row_settings(state, slots, following), logits
    if kind is Kind.ADJUSTED:
        raw = logits.clone()
        adjust_rows(logits, settings, state, slots, following, seen)
    tokens, found, _, _ = sample(logits, *settings[:6])
    words = [tokens, finish_rows(state, slots, following, tokens, found)]
    if kind is Kind.ADJUSTED:
        note_rows(settings, words[0], words[1], seen)
    if kind in TABLED:
        columns = min(COLUMNS, logits.shape[1])
        words += pack(top_logprobs(raw, settings.asks, tokens, settings.widths, columns))
    return torch.cat(words)


def adjust_rows(
    logits: Tensor, settings: RowSettings, state: Tensor, slots: Tensor, following: Tensor, seen: Tensor | None
) -> None:
    """Apply minimum lengths and penalties of rows to their logits [R, V], in place."""
    hold_stops(logits, state, slots, following)
    if seen is not None:
        penalise(logits, seen, settings.seen, settings.repetition, settings.frequency, settings.presence)


def note_rows(settings: RowSettings, tokens: Tensor, status: Tensor, seen: Tensor | None) -> None:
    """Note the tokens that rows with penalties sampled."""
    if seen is not None:
        good = (status == Status.OK) | (status == Status.STOP)
        note_tokens(seen, torch.where(good, settings.seen, -1), tokens, output=True)


TABLED = (Kind.LOGPROBS, Kind.ADJUSTED)  # kinds that make a table of logprobs


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the host knows of a step's sampling rows.

    Attributes:
        slots: [R]
        following: [R]
        special: rows whose logits change in ways that the host prepares, with their lines.
        adjusted: whether the device has logits of others to change.
        raw: [R] width of the table of raw logprobs, -1 = none.
        processed: [R] the same of processed ones.
        greedy: [R] whether a row takes the best token.
        masks: allowed tokens, still being computed.
    """

    slots: IntArray
    following: LongArray
    special: Sequence[tuple[int, Row]]
    adjusted: bool
    raw: IntArray
    processed: IntArray
    greedy: BoolArray
    masks: MaskHandle | None

    @property
    def columns(self) -> int:
        """Return the width of the tables: one of two, so that nothing is compiled for a third."""
        return COLUMNS if max(self.raw.max(), self.processed.max()) <= COLUMNS else WIDE


def choose_special(
    wishes: Wishes, logits: Tensor, rows: RowTable, slots: Tensor, following: Tensor, processors: Processors
) -> Tensor:
    """Do what `choose` does for rows whose logits are changed, or that want wide or processed tables.

    Returns:
        The words of tokens and status, and of two tables: raw and processed.
    """
    raw = logits.clone() if (wishes.raw >= 0).any() else logits
    finite = logits.amax(-1).isfinite()
    if wishes.masks is not None:
        apply_masks(logits, wishes.slots.tolist(), wishes.masks)
    adjust(logits, wishes.special, wishes.following, processors)
    logits.masked_fill_(~finite[:, None], float("nan"))
    state = rows.state
    settings = row_settings(state, slots, following)
    adjust_rows(logits, settings, state, slots, following, rows.seen)
    # The best token survives any cut; only processed logprobs show what the cut left out beside it.
    shown = to_device(wishes.greedy & (wishes.processed >= 0), logits.device)
    settings = settings._replace(temperature=torch.where(shown, 1.0, settings.temperature))
    drawn = sample(logits, *settings[:6])
    tokens = torch.where(shown, argmax(logits).tokens, drawn.tokens)
    words = [tokens, finish_rows(state, slots, following, tokens, drawn.status)]
    note_rows(settings, words[0], words[1], rows.seen)
    words += _table(raw, wishes.raw, tokens, wishes.columns)
    if (wishes.processed >= 0).any():
        lines = to_device(_lines(wishes.processed), logits.device)
        drop_rest(logits, lines, settings.temperature, drawn.cut_keys, drawn.cut_ids)
    words += _table(logits, wishes.processed, tokens, wishes.columns)
    return torch.cat(words)


def _lines(widths: IntArray) -> IntArray:
    return np.where(widths >= 0, np.arange(len(widths)), -1).astype(np.int32)


def _table(logits: Tensor, widths: IntArray, tokens: Tensor, columns: int) -> list[Tensor]:
    asks = columns_to_device(logits.device, _lines(widths), np.maximum(widths, 0))
    return pack(top_logprobs(logits, asks[0], tokens, asks[1], min(columns, logits.shape[1])))


def pack(table: TopLogprobs) -> list[Tensor]:
    """Return the words of a table: own [M], ranks [M], counts [M], status [M], ids [M N], values [M N]."""
    numbers = table.own.view(torch.int32), table.values.view(torch.int32).flatten()
    return [numbers[0], table.ranks, table.counts, table.status, table.ids.flatten(), numbers[1]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of logprobs on the host, for M positions; see `TopLogprobs`."""

    own: FloatArray  # [M]
    ranks: IntArray  # [M]
    counts: IntArray  # [M]
    ids: IntArray  # [M, N]
    values: FloatArray  # [M, N]

    def at(self, rows: LongArray) -> Table:
        """Return some of its rows."""
        return Table(self.own[rows], self.ranks[rows], self.counts[rows], self.ids[rows], self.values[rows])


def unpack(words: IntArray, rows: int, columns: int) -> tuple[Table, IntArray]:
    """Return the table at the front of an array of words, and what is behind it."""
    own, ranks, counts, _, rest = np.split(words, [rows, 2 * rows, 3 * rows, 4 * rows])
    ids, values, rest = np.split(rest, [rows * columns, 2 * rows * columns])
    shape = (rows, columns)
    table = Table(own.view(np.float32), ranks, counts, ids.reshape(shape), values.view(np.float32).reshape(shape))
    return table, rest
