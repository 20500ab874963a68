"""Attention of one step: rows that decode at the front, chunks of prompts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slotline.kernels.paged_attention import WorkList, list_splits, paged_attention, split_for
from slotline.kernels.prefill_attention import Chunks, prefill_attention
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.inputs import Columns


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
            split, most = split_for(len(lengths))
            capacity = len(lengths) * min(-(-longest // split), most)
            self._work = {
                w: list_splits(lengths, capacity, w, split, most, self._slots) for w in sorted(set(shape.windows))
            }

    def __call__(self, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Return [T, Hq, D] for queries [T, Hq, D], whose keys and values are in their pages."""
        window, shape = self._shape.windows[kind], self._shape
        if len(self._wholes) == 1 and self._wholes[0].end - self._wholes[0].begin == len(q):
            return _within(self._wholes[0], q, k_pages, v_pages, shape.scale)
        out = torch.empty_like(q)
        if self._chunks is not None:
            prefill_attention(
                q, k_pages, v_pages, self._tables, self._chunks,
                scale=shape.scale, window=window, soft_cap=shape.soft_cap, out=out, dependent=True,
            )  # fmt: skip
        for whole in self._wholes:
            out[whole.begin : whole.end] = _within(whole, q, k_pages, v_pages, shape.scale)
        if lines := len(self._lengths):
            paged_attention(
                q[:lines], k_pages, v_pages, self._tables, self._slots, self._lengths, self._work[window],
                scale=shape.scale, window=window, soft_cap=shape.soft_cap, out=out[:lines], dependent=True,
            )  # fmt: skip
        return out


def _within(whole: Whole, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
    """Return [L, Hq, D] the library's attention within a chunk; its keys and values are gathered from their pages."""
    count = whole.end - whole.begin

    def gathered(pages: Tensor) -> Tensor:
        return pages.index_select(0, whole.blocks).transpose(0, 1).flatten(1, 2)[None, :, :count]  # [1, Hkv, L, D]

    query = q[whole.begin : whole.end].transpose(0, 1)[None]  # [1, Hq, L, D]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        found = functional.scaled_dot_product_attention(
            query, gathered(k_pages), gathered(v_pages), is_causal=True, scale=scale, enable_gqa=True
        )
    return found[0].transpose(0, 1)
