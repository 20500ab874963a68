"""Attention over the paged KV pool: what a step reads and writes, decided once and used by every layer.

The pool of a layer is [places, 2 * K * D]: a place holds one token's keys, then its values. A
block is ``block_size`` places in a row, so a row's table turns into a list of places, and reading
a row is one gather. Masked places repeat one that was written, since what lies in unwritten
memory, or was left by a row that overflowed, may be NaN, and NaN times zero is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slotline.plan import LongArray
from slotline.plugins.torch_backend.rows import Row

SPAN = 64  # in deterministic mode keys are read in multiples of this, by position alone
_SMALLEST_BITS = 6  # decoding rows of up to 64 tokens share a group, then up to 128, 256, ...


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention."""

    queries: int  # H
    keys: int  # K
    dim: int  # D
    scale: float  # of the scores
    softcap: float | None = None  # scores are squeezed into (-cap, cap)

    @property
    def group(self) -> int:
        """Return how many query heads share a key head."""
        return self.queries // self.keys


@dataclass(frozen=True, slots=True)
class Read:
    """Queries that are answered together, and the places they read.

    Attributes:
        tokens: which of the step's tokens ask; None = all, in order.
        places: [N, L] for one token each of N sequences, or [1, L] for N tokens of one sequence.
        mask: added to the scores; None = every place is seen.
        causal: N tokens from the start of one sequence: each sees itself and those before it.
        together: N tokens of one sequence are one problem; else each token is one of its own.
    """

    tokens: Tensor | None
    places: Tensor
    mask: Tensor | None
    causal: bool = False
    together: bool = True


class Attention:
    """What one step reads and writes, for every layer alike."""

    def __init__(self, heads: Heads, write: Tensor, reads: Sequence[Sequence[Read]]) -> None:
        self._heads = heads
        self._write = write  # [T] places of the step's tokens
        self._reads = reads  # by kind of layer

    def __call__(self, kind: int, pool: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Store the step's keys and values, and answer its queries.

        Args:
            kind: of the layer, which says how far its tokens see.
            pool: [places, 2 * K * D] of this layer.
            q: [T, H, D]
            kv: [T, 2 * K * D]

        Returns:
            [T, H * D]
        """
        pool.index_copy_(0, self._write, kv)
        reads = self._reads[kind]
        if len(reads) == 1 and reads[0].tokens is None:
            return self._answer(reads[0], pool, q)
        out = torch.empty_like(q).view(len(q), -1)
        for read in reads:
            assert read.tokens is not None
            out.index_copy_(0, read.tokens, self._answer(read, pool, q.index_select(0, read.tokens)))
        return out

    def _answer(self, read: Read, pool: Tensor, q: Tensor) -> Tensor:
        h, n = self._heads, len(q)
        sequences, length = read.places.shape
        kv = pool.index_select(0, read.places.view(-1)).view(sequences, length, 2, h.keys, h.dim)
        if kv.dtype is not torch.float32 and kv.device.type == "cpu":
            kv, q = kv.float(), q.float()  # attention in bfloat16 takes several times as long on a CPU
        keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [S, K, L, D]
        if read.together:
            q = q.view(1, n, h.queries, h.dim).transpose(1, 2)  # [1, H, N, D]
            out = self._attend(q, keys, values, read).transpose(1, 2)  # [1, N, H, D]
        else:
            q = q.view(n, h.keys, h.group, h.dim)  # the group takes the place of query positions
            keys, values = keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1)
            out = self._attend(q, keys, values, read)  # [N, K, G, D]
        return out.reshape(n, -1).to(pool.dtype)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, read: Read) -> Tensor:
        h = self._heads
        if h.softcap is None:
            return functional.scaled_dot_product_attention(
                q,
                keys,
                values,
                attn_mask=read.mask,
                is_causal=read.causal,
                scale=h.scale,
                enable_gqa=q.shape[1] != keys.shape[1],
            )
        if q.shape[1] != keys.shape[1]:
            keys, values = keys.repeat_interleave(h.group, 1), values.repeat_interleave(h.group, 1)
        scores = torch.tanh(q @ keys.transpose(-1, -2) * (h.scale / h.softcap)) * h.softcap
        if read.mask is not None:
            scores = scores + read.mask
        return scores.softmax(-1, torch.float32).to(values.dtype) @ values


class AttentionPlanner:
    """Decide how a step's tokens attend.

    Args:
        windows: tokens each one sees, itself included, by kind of layer; None = all before it.
    """

    def __init__(
        self,
        heads: Heads,
        windows: Sequence[int | None],
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool,
    ) -> None:
        self._heads = heads
        self._windows = windows
        self._device = device
        self._dtype = torch.float32 if device.type == "cpu" else dtype
        self._deterministic = deterministic

    def plan(self, rows: Sequence[Row], start: LongArray, count: LongArray) -> Attention:
        """Plan a step in which row ``i`` computes ``count[i]`` positions from ``start[i]``."""
        write = np.concatenate([r.slots[s : s + c] for r, s, c in zip(rows, start, count, strict=True)])
        first = np.concatenate([[0], np.cumsum(count)[:-1]])  # each row's first token in the step
        reads = [self._reads(window, rows, start, count, first) for window in self._windows]
        return Attention(self._heads, self._tensor(write), reads)

    def _reads(
        self, window: int | None, rows: Sequence[Row], start: LongArray, count: LongArray, first: LongArray
    ) -> list[Read]:
        if self._deterministic:
            return [
                read
                for row, s, c, f in zip(rows, start.tolist(), count.tolist(), first.tolist(), strict=True)
                for read in self._by_span(window, row, s, c, f)
            ]
        reads, total = self._decoding(window, rows, start, count, first), int(count.sum())
        for i in np.flatnonzero(count > 1).tolist():
            reads.append(self._chunk(window, rows[i], int(start[i]), int(count[i]), int(first[i]), total))
        return reads

    def _decoding(
        self, window: int | None, rows: Sequence[Row], start: LongArray, count: LongArray, first: LongArray
    ) -> list[Read]:
        """Group rows that compute one token by length, so that padding at most doubles the work."""
        groups: dict[int, list[int]] = {}
        for i in np.flatnonzero(count == 1).tolist():
            bits = max(int(start[i]).bit_length(), _SMALLEST_BITS)
            groups.setdefault(bits, []).append(i)
        reads = []
        for members in groups.values():
            whole = len(members) == len(rows)  # in order then, so nothing is picked or put back
            tokens = None if whole else self._tensor(first[members])
            reads.append(self._padded(window, tokens, [rows[i] for i in members], start[members]))
        return reads

    def _padded(self, window: int | None, tokens: Tensor | None, rows: Sequence[Row], start: LongArray) -> Read:
        low = np.zeros_like(start) if window is None else np.maximum(start + 1 - window, 0)
        lengths = start + 1 - low
        longest = int(lengths.max())
        places = np.empty((len(rows), longest), np.int64)
        for line, row, a, n in zip(places, rows, low.tolist(), lengths.tolist(), strict=True):
            line[:n] = row.slots[a : a + n]
            line[n:] = line[0]
        if bool((lengths == longest).all()):
            return Read(tokens, self._tensor(places), None, together=False)
        seen = np.arange(longest) < lengths[:, None]
        return Read(tokens, self._tensor(places), self._mask(seen[:, None, None, :]), together=False)

    def _chunk(self, window: int | None, row: Row, start: int, count: int, first: int, total: int) -> Read:
        """Let a row's chunk attend to all that came before it and to itself, causally."""
        tokens = None if count == total else torch.arange(first, first + count, device=self._device)
        end = start + count
        low = 0 if window is None else max(start + 1 - window, 0)  # the first that any of them sees
        places = self._tensor(row.slots[None, low:end])
        if start == 0 and (window is None or end <= window) and self._heads.softcap is None:
            return Read(tokens, places, None, causal=True)
        seen = _seen(window, np.arange(start, end), np.arange(low, end))
        return Read(tokens, places, self._mask(seen[None, None]))

    def _by_span(self, window: int | None, row: Row, start: int, count: int, first: int) -> list[Read]:
        """Give each token a shape that depends on its own position alone, whatever it is computed with."""
        reads = []
        end = start + count
        for low in range(start - start % SPAN, end, SPAN):
            a, b = max(low, start), min(low + SPAN, end)
            places = np.empty((1, low + SPAN), np.int64)
            known = row.slots[: min(low + SPAN, end)]
            places[0, : len(known)] = known
            places[0, len(known) :] = known[0]
            tokens = torch.arange(first + a - start, first + b - start, device=self._device)
            seen = _seen(window, np.arange(a, b), np.arange(low + SPAN))
            reads.append(Read(tokens, self._tensor(places), self._mask(seen[:, None, None, :]), together=False))
        return reads

    def _mask(self, seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype)
        return mask.masked_fill_(torch.from_numpy(~seen), float("-inf")).to(self._device)

    def _tensor(self, array: LongArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _seen(window: int | None, positions: LongArray, keys: LongArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return [N, L] which of L positions each of N positions sees."""
    seen = keys <= positions[:, None]
    return seen if window is None else seen & (keys > positions[:, None] - window)
