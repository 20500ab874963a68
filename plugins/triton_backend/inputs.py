"""What a step brings to the device: one array of int32 words, cut into columns, the same on the host and there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from slotline.kernels.prefill_attention import TILE
from slotline.plan import BoolArray, IntArray, LongArray, StepPlan

Words = TypeVar("Words")  # a NumPy array or a tensor

HEADER = 4


@dataclass(frozen=True, slots=True)
class Columns(Generic[Words]):
    """The columns of a step, padded to the sizes of its layout.

    Attributes:
        decoding: [4] first how many tokens at the front are rows with one token each, then nothing.
        picks: [C] which token's output each sampling row takes.
        slots: [C] its slot.
        following: [C] absolute position of the token that it samples.
        tokens: [T] ids, -1 = sampled last.
        positions: [T]
        token_slots: [T]
        begins: [C + 1] where each chunk, a row behind those at the front, begins among the tokens.
        starts: [C] the position of its first token.
        chunk_slots: [C]
        tile_chunks, tile_numbers: [N] the chunks' tiles, those with most keys first; then chunk -1, no tile.
    """

    decoding: Words
    picks: Words
    slots: Words
    following: Words
    tokens: Words
    positions: Words
    token_slots: Words
    begins: Words
    starts: Words
    chunk_slots: Words
    tile_chunks: Words
    tile_numbers: Words


@dataclass(frozen=True)
class Layout:
    """Sizes of the columns. What sampling reads comes first: its place is the same for all layouts with equal rows.

    Attributes:
        rows: C, rows that the engine has.
        tokens: T.
        tiles: N, 0 where every row brings one token.
    """

    rows: int
    tokens: int
    tiles: int

    @classmethod
    def of(cls, rows: int, tokens: int, *, chunks: bool) -> Layout:
        """Return the layout for so many tokens, whatever rows they belong to."""
        return cls(rows, tokens, -(-tokens // TILE) + min(rows, tokens) if chunks else 0)

    @cached_property
    def cuts(self) -> tuple[slice, ...]:
        """Return where the columns lie, each from a multiple of 16 bytes on: Triton compiles again for others."""
        chunks = (self.rows + 1, self.rows, self.rows) if self.tiles else (0, 0, 0)
        sizes = (HEADER, *(self.rows,) * 3, *(self.tokens,) * 3, *chunks, self.tiles, self.tiles)
        begins = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False))

    @property
    def words(self) -> int:
        """Return how many words all of it takes."""
        return -(-int(self.cuts[-1].stop) // 4) * 4

    @cached_property
    def blank(self) -> IntArray:
        """Return words that are padding only: rows of nobody, the line behind the last slot, and tiles of no chunk."""
        words = np.zeros(self.words, np.int32)
        columns = self.split(words)
        columns.slots[:] = columns.token_slots[:] = self.rows
        columns.tile_chunks[:] = -1
        words.flags.writeable = False
        return words

    def split(self, words: Words) -> Columns[Words]:
        """Return the columns of an array of words."""
        return Columns(*(words[cut] for cut in self.cuts))  # type: ignore[index]


def fill_single(layout: Layout, plan: StepPlan) -> IntArray:
    """Return the words of a plan whose rows bring one token each and sample; `picks` is left out."""
    words, count = layout.blank.copy(), len(plan)
    decoding, _, slots, following, tokens, positions, token_slots, *_ = (cut.start for cut in layout.cuts)
    words[decoding] = count
    words[slots : slots + count] = words[token_slots : token_slots + count] = plan.rows
    words[following : following + count] = plan.start + 1
    words[positions : positions + count] = plan.start
    words[tokens : tokens + count] = plan.token_ids
    return words


def fill(
    layout: Layout, plan: StepPlan, left_out: Mapping[int, int] = MappingProxyType({}), *, decode: bool = True
) -> IntArray:
    """Return the words of a plan; what is left over is padding, see `Layout.blank`.

    Args:
        left_out: by line of the plan, how many tokens at its front get no tiles, whole tiles of them: their attention
            is computed elsewhere.
        decode: rows with one token at the front decode; otherwise they are chunks as well.
    """
    words = layout.blank.copy()
    columns = layout.split(words)
    chosen = np.flatnonzero(plan.sample)
    n, count = len(chosen), plan.num_tokens
    columns.slots[:n] = plan.rows[chosen]
    columns.following[:n] = (plan.start + plan.count)[chosen]
    columns.tokens[:count] = plan.token_ids
    ends = np.cumsum(plan.count)
    columns.picks[:n] = ends[chosen] - 1
    columns.token_slots[:count] = np.repeat(plan.rows, plan.count)
    columns.positions[:count] = np.arange(count) + np.repeat(plan.start - (ends - plan.count), plan.count)
    single = leading_singles(plan.count) if decode else 0
    columns.decoding[0] = single
    if layout.tiles:
        _fill_chunks(columns, plan, single, ends, left_out)
    return words


def leading_singles(count: IntArray) -> int:
    """Return how many rows at the front bring one token each."""
    return int(np.argmax(count > 1)) if (count > 1).any() else len(count)


def _fill_chunks(
    columns: Columns[IntArray], plan: StepPlan, single: int, ends: IntArray | LongArray, left_out: Mapping[int, int]
) -> None:
    """Fill in the rows behind the first ``single`` ones as chunks."""
    start, count = plan.start[single:], plan.count[single:]
    chunks = len(start)
    columns.begins[:] = plan.num_tokens
    columns.begins[:chunks] = (ends - plan.count)[single:]
    columns.starts[:chunks] = start
    columns.chunk_slots[:chunks] = plan.rows[single:]
    first = np.zeros(chunks, np.int32)
    for line, tokens in left_out.items():
        first[line - single] = tokens // TILE
    tiles = -(-count // TILE) - first
    chunk = np.repeat(np.arange(chunks), tiles)
    number = np.arange(len(chunk)) - np.repeat(np.cumsum(tiles) - tiles - first, tiles)
    order = np.argsort(-(start[chunk] + number * TILE), kind="stable")
    columns.tile_chunks[: len(chunk)] = chunk[order]
    columns.tile_numbers[: len(chunk)] = number[order]


def all_single(plan: StepPlan) -> bool:
    """Tell whether every row brings one token and samples."""
    singles: BoolArray = (plan.count == 1) & plan.sample
    return bool(singles.all())
