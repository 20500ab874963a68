"""What a step's tokens read and write: prepared once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotline.kernels.paged_attention import WorkList, list_splits, paged_attention
from slotline.kernels.prefill_attention import Chunks, list_tiles, prefill_attention
from slotline.plan import LongArray
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.torch_backend.rows import Row

PAGE = 64


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


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows that bring one token each.

    Attributes:
        tables: [B, pages] int32 blocks of each row.
        table_rows: [B] int32, simply 0, 1, 2, ...
        lengths: [B] int32 keys of each row, the new one included; 0 = no row.
    """

    tables: Tensor
    table_rows: Tensor
    lengths: Tensor

    def work(self, shape: Shape, capacity: int) -> dict[int, WorkList]:
        """Return a work list for each window."""
        split = split_for(len(self.lengths))
        return {window: list_splits(self.lengths, capacity, window, split) for window in set(shape.windows)}


class StepAttention:
    """Attention of one step.

    Attributes:
        places: [T] int32, where each token's key and value go.
        decoding: set where every row brings one token.
    """

    def __init__(
        self,
        shape: Shape,
        places: Tensor,
        decoding: Decoding | None,
        capacity: int,
        chunks: Chunks | None = None,
        tables: Tensor | None = None,
    ) -> None:
        self.places = places
        self.decoding = decoding
        self._shape = shape
        self._work = decoding.work(shape, capacity) if decoding is not None else {}
        self._chunks = chunks
        self._tables = tables

    def __call__(self, kind: int, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Return [T, Hq, D] for queries [T, Hq, D], whose keys and values are in their pages."""
        window = self._shape.windows[kind]
        scale, cap = self._shape.scale, self._shape.soft_cap
        d = self.decoding
        if d is not None:
            work = self._work[window]
            return paged_attention(
                q, k_pages, v_pages, d.tables, d.table_rows, d.lengths, work, scale=scale, window=window, soft_cap=cap
            )
        assert self._chunks is not None and self._tables is not None
        return prefill_attention(
            q, k_pages, v_pages, self._tables, self._chunks, scale=scale, window=window, soft_cap=cap
        )


class AttentionPlanner:
    """Turn the rows of a step into what the kernels read.

    Args:
        longest: tokens of the longest sequence, which bounds the number of splits.
    """

    def __init__(self, shape: Shape, device: torch.device, longest: int) -> None:
        self.shape = shape
        self.device = device
        self._longest = longest

    def capacity(self, rows: int) -> int:
        """Return the most splits that so many rows can have."""
        return rows * -(-self._longest // split_for(rows))

    def plan(self, rows: Sequence[Row], start: LongArray, count: LongArray) -> StepAttention:
        """Return the attention of one step."""
        places = self._tensor(np.concatenate([r.slots[s : s + n] for r, s, n in zip(rows, start, count, strict=True)]))
        tables = self._tensor(_tables(rows, start + count))
        if (count == 1).all():
            order = torch.arange(len(rows), dtype=torch.int32, device=self.device)
            decoding = Decoding(tables, order, self._tensor(start + 1))
            splits = int((-(-(start + 1) // split_for(len(rows)))).sum())
            return StepAttention(self.shape, places, decoding, splits)
        chunks = list_tiles(start.tolist(), count.tolist(), list(range(len(rows))), self.device)
        return StepAttention(self.shape, places, None, 0, chunks, tables)

    def _tensor(self, array: LongArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self.device, non_blocking=True)


def _tables(rows: Sequence[Row], lengths: LongArray) -> LongArray:
    """Return [R, pages] the blocks that hold each row's keys; 0, the scratch block, past its end."""
    pages = -(-lengths // PAGE)
    tables = np.zeros((len(rows), int(pages.max())), np.int64)
    for line, (row, n) in enumerate(zip(rows, pages.tolist(), strict=True)):
        tables[line, :n] = row.slots[: n * PAGE : PAGE] // PAGE
    return tables
