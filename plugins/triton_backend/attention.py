"""Attention of one step: rows that decode at the front, chunks of prompts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slotline.kernels.paged_attention import WorkList, cut_for, list_splits, paged_attention
from slotline.kernels.prefill_attention import TILE, Chunks, prefill_attention
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.inputs import Columns

LONG = 1024  # tokens of a chunk from which on library attention is faster than reading pages
FINE, COARSE = 8192, 1024  # lengths that it gets are whole tiles up to the former, multiples of the latter above


def library_length(count: int) -> int:
    """Return how many of the tokens at the front of a long chunk library attention takes.

    Getting ready for a length that is new to it takes it 45 ms, so there are few, and all are tried at the start.
    """
    step = TILE if count <= FINE else COARSE
    return count // step * step


def library_lengths(most: int) -> list[int]:
    """Return the lengths that chunks of up to ``most`` tokens may have there."""
    return sorted({library_length(count) for count in range(LONG, most + 1)})


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels must know: the scale of the scores, their soft cap, a window per layer kind, heads."""

    scale: float
    soft_cap: float
    windows: tuple[int, ...]
    kv_heads: int

    @classmethod
    def of(cls, config: DecoderConfig) -> Shape:
        """Read a decoder description."""
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        windows = tuple(kind.window or 0 for kind in config.layer_kinds)
        return cls(scale, config.attention_softcap or 0.0, windows, config.num_kv_heads)

    @property
    def plain(self) -> bool:
        """Tell whether library attention can do it, too."""
        return not self.soft_cap and not any(self.windows)


@dataclass(frozen=True, slots=True)
class Whole:
    """Tokens ``begin .. end`` of the step that start a sequence and are many."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with one query each: their slots [D], keys [D], and a work list for each window."""

    slots: Tensor
    lengths: Tensor
    work: dict[int, WorkList]


class StepAttention:
    """Attention of one step, the same for all its layers.

    Args:
        tables: [S, pages] block tables.
        columns: of the step.
        lengths: [D] keys of each row that decodes, 0 = none.
        longest: tokens of the longest sequence, which bounds the number of splits.
        wholes: what is left to library attention; the columns list no tiles of it.
        picks: `picked` will be asked.
        exact: a query has the same bits in any chunk.
    """

    def __init__(
        self,
        shape: Shape,
        tables: Tensor,
        columns: Columns[Tensor],
        lengths: Tensor,
        longest: int,
        wholes: Sequence[Whole] = (),
        *,
        picks: bool = False,
        exact: bool = False,
    ) -> None:
        self._shape = shape
        self._exact = exact
        self._tables = tables
        self._wholes = wholes
        self._chunks: Chunks | None = None
        if len(columns.tile_chunks):
            self._chunks = Chunks(
                columns.begins, columns.starts, columns.chunk_slots, columns.tile_chunks, columns.tile_numbers
            )
        self._front = self._rows(columns.token_slots[: len(lengths)], lengths, longest)
        # A row's last token has as many keys as the position that it samples.
        self._picks = self._rows(columns.slots, columns.following, longest) if picks else None

    def _rows(self, slots: Tensor, lengths: Tensor, longest: int) -> Rows | None:
        if not len(lengths):
            return None
        cut = cut_for(len(lengths), self._shape.kv_heads)
        capacity = cut.capacity(len(lengths), longest)
        windows = sorted(set(self._shape.windows))
        return Rows(slots, lengths, {w: list_splits(lengths, capacity, w, cut, slots) for w in windows})

    def __call__(self, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor, qkv: Tensor) -> Tensor:
        """Return [T, Hq, D] for queries [T, Hq, D].

        Args:
            kind: of the layer.
            k_pages, v_pages: hold the step's keys and values already.
            qkv: [T, (Hq + 2 Hkv) D] holds them, too, its keys rotated, where there are wholes.
        """
        window, shape = self._shape.windows[kind], self._shape
        if len(self._wholes) == 1 and self._wholes[0].end - self._wholes[0].begin == len(q):
            return _within(self._wholes[0], q, qkv, shape.kv_heads, shape.scale)
        out = torch.empty_like(q)
        if self._chunks is not None:
            prefill_attention(
                q, k_pages, v_pages, self._tables, self._chunks,
                scale=shape.scale, window=window, soft_cap=shape.soft_cap, out=out, alike=self._exact,
            )  # fmt: skip
        for whole in self._wholes:
            out[whole.begin : whole.end] = _within(whole, q, qkv, shape.kv_heads, shape.scale)
        if self._front is not None:
            lines = len(self._front.lengths)
            self._attend(self._front, kind, q[:lines], k_pages, v_pages, out[:lines])
        return out

    def picked(self, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Return [C, Hq, D] for the queries [C, Hq, D] of the tokens that sampling rows take."""
        assert self._picks is not None, "it was not said that picks would be asked for"
        return self._attend(self._picks, kind, q, k_pages, v_pages, torch.empty_like(q))

    def _attend(self, rows: Rows, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> Tensor:
        window, shape = self._shape.windows[kind], self._shape
        return paged_attention(
            q, k_pages, v_pages, self._tables, rows.slots, rows.lengths, rows.work[window],
            scale=shape.scale, window=window, soft_cap=shape.soft_cap, out=out, dependent=len(q) == 1,
        )  # fmt: skip


def _within(whole: Whole, q: Tensor, qkv: Tensor, kv_heads: int, scale: float) -> Tensor:
    """Return [L, Hq, D] the library's attention among these tokens."""
    heads, dim = q.shape[1:]
    parts = qkv[whole.begin : whole.end].view(whole.end - whole.begin, -1, dim).transpose(0, 1)[None]
    query = q[whole.begin : whole.end].transpose(0, 1)[None]  # [1, Hq, L, D]
    keys, values = parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        found = functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return found[0].transpose(0, 1)
