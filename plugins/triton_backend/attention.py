"""Attention of one step: rows that decode at the front, chunks of prompts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slotline.kernels.paged_attention import WorkList, list_splits, paged_attention
from slotline.kernels.prefill_attention import Chunks, prefill_attention
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.inputs import Columns


def split_for(rows: int) -> int:
    """Return how many keys one program takes: few where rows are few, measured on one H200."""
    return 128 if rows <= 8 else 256 if rows <= 32 else 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels must know of attention: the scale of the scores, their soft cap, and a window per layer kind."""

    scale: float
    soft_cap: float
    windows: tuple[int, ...]

    @classmethod
    def of(cls, config: DecoderConfig) -> Shape:
        """Read a decoder description."""
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        windows = tuple(kind.window or 0 for kind in config.layer_kinds)
        return cls(scale, config.attention_softcap or 0.0, windows)

    @property
    def plain(self) -> bool:
        """Tell whether library attention can do it, too."""
        return not self.soft_cap and not any(self.windows)


@dataclass(frozen=True, slots=True)
class Whole:
    """A chunk that starts its sequence and is long: tokens ``begin .. end`` of the step, and their blocks."""

    begin: int
    end: int
    blocks: Tensor


class StepAttention:
    """Attention of one step, the same for all its layers.

    Args:
        tables: [S, pages] block tables.
        columns: of the step.
        lengths: [D] keys of each row that decodes, 0 = none.
        longest: tokens of the longest sequence, which bounds the number of splits.
        wholes: chunks that are left to library attention; the columns list none of their tiles.
    """

    def __init__(
        self,
        shape: Shape,
        tables: Tensor,
        columns: Columns[Tensor],
        lengths: Tensor,
        longest: int,
        wholes: Sequence[Whole] = (),
    ) -> None:
        self._shape = shape
        self._tables = tables
        self._slots = columns.token_slots[: len(lengths)]
        self._lengths = lengths
        self._wholes = wholes
        self._chunks: Chunks | None = None
        if len(columns.tile_chunks):
            self._chunks = Chunks(
                columns.begins, columns.starts, columns.chunk_slots, columns.tile_chunks, columns.tile_numbers
            )
        self._work: dict[int, WorkList] = {}
        if len(lengths):
            split = split_for(len(lengths))
            capacity = len(lengths) * -(-longest // split)
            self._work = {w: list_splits(lengths, capacity, w, split) for w in set(shape.windows)}

    def __call__(self, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Return [T, Hq, D] for queries [T, Hq, D], whose keys and values are in their pages."""
        window, shape = self._shape.windows[kind], self._shape
        if self._chunks is None:
            return self._decode(q, k_pages, v_pages, window)
        out = prefill_attention(
            q, k_pages, v_pages, self._tables, self._chunks, scale=shape.scale, window=window, soft_cap=shape.soft_cap
        )
        for whole in self._wholes:
            _attend_whole(whole, q, k_pages, v_pages, out, shape.scale)
        if len(self._lengths):
            front = out[: len(self._lengths)]
            decoded = self._decode(q[: len(front)], k_pages, v_pages, window)
            front.copy_(torch.where(self._lengths[:, None, None] > 0, decoded, front))
        return out

    def _decode(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int) -> Tensor:
        work, shape = self._work[window], self._shape
        return paged_attention(
            q, k_pages, v_pages, self._tables, self._slots, self._lengths, work,
            scale=shape.scale, window=window, soft_cap=shape.soft_cap,
        )  # fmt: skip


def _attend_whole(whole: Whole, q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, scale: float) -> None:
    """Let the library attend within a chunk that starts its sequence; its keys and values are gathered from pages."""
    count, heads = whole.end - whole.begin, q.shape[1]

    def gathered(pages: Tensor) -> Tensor:
        found = pages.index_select(0, whole.blocks).transpose(0, 1).flatten(1, 2)[:, :count]  # [Hkv, L, D]
        return found.repeat_interleave(heads // len(found), 0)[None]

    query = q[whole.begin : whole.end].transpose(0, 1)[None]  # [1, Hq, L, D]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        found = functional.scaled_dot_product_attention(
            query, gathered(k_pages), gathered(v_pages), is_causal=True, scale=scale
        )
    out[whole.begin : whole.end] = found[0].transpose(0, 1)
