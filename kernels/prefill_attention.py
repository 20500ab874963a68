"""Causal attention of prompt chunks over their pages, prefixes read in place.

    o_i = softmax(scale q_i K^T) V        over the keys at positions up to i's own, or the last ``window`` of them

The chunks' keys and values are in their pages already. A program takes a tile of one chunk's queries and one head, and
goes over the pages that any of them sees. Tiles with most keys start first, so that the last ones are short. Dao,
"FlashAttention-2", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import jit, padded

TILE = 64  # queries a program


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which queries belong together: R chunks, their tiles in the order to start them.

    Attributes:
        begins: [R + 1] int32, the chunk's queries are ``begins[r] .. begins[r + 1]``.
        starts: [R] int32, position of its first query.
        table_rows: [R] int32, its table row.
        tile_chunks, tile_numbers: [tiles] int32.
    """

    begins: Tensor
    starts: Tensor
    table_rows: Tensor
    tile_chunks: Tensor
    tile_numbers: Tensor


def list_tiles(starts: list[int], counts: list[int], table_rows: list[int], device: torch.device) -> Chunks:
    """Return chunks of ``counts`` queries from position ``starts`` on, as tiles, those with most keys first."""
    sized = enumerate(zip(starts, counts, strict=True))
    tiles = [(start + t * TILE, r, t) for r, (start, n) in sized for t in range(-(-n // TILE))]
    tiles.sort(key=lambda tile: (-tile[0], tile[1]))
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count)
    columns = begins, starts, table_rows, [t[1] for t in tiles], [t[2] for t in tiles]
    return Chunks(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


@jit
def _prefill_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    tables: tl.tensor,
    begins: tl.tensor,
    starts: tl.tensor,
    table_rows: tl.tensor,
    tile_chunks: tl.tensor,
    tile_numbers: tl.tensor,
    out: tl.tensor,
    table_stride: int,
    scale: float,
    cap: float,
    window: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    chunk = tl.load(tile_chunks + tl.program_id(0))
    number = tl.load(tile_numbers + tl.program_id(0))
    begin, end = tl.load(begins + chunk), tl.load(begins + chunk + 1)
    start = tl.load(starts + chunk)
    line, dim, key = tl.arange(0, TILE), tl.arange(0, DIM_PAD), tl.arange(0, PAGE)
    token = number * TILE + line
    real = token < end - begin
    position = start + token
    source = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    inside = real[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + source, mask=inside, other=0.0)  # [M, D]
    table = tables + tl.load(table_rows + chunk).to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    top = tl.minimum(start + (number + 1) * TILE, start + end - begin)  # keys that some query of the tile sees
    oldest = tl.where(window > 0, tl.maximum(start + number * TILE - window + 1, 0), 0)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DIM_PAD), tl.float32)
    for page in range(oldest // PAGE, (top + PAGE - 1) // PAGE):
        block = tl.load(table + page).to(tl.int64)
        base = (block * KV_HEADS + kv_head) * PAGE * DIM
        keys = tl.load(k_pages + base + key[None, :] * DIM + dim[:, None], mask=(dim < DIM)[:, None], other=0.0)
        logits = tl.dot(query, keys, input_precision="ieee") * scale  # [M, P]
        if CAPPED:
            ratio = logits / cap
            logits = cap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)  # tanh
        at = page * PAGE + key
        seen = at[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (at[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen no key yet
        shrink = tl.exp2(peak - base_peak)
        weights = tl.exp2(logits - base_peak[:, None])
        values = tl.load(v_pages + base + key[:, None] * DIM + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
        values = tl.where((at < top)[:, None], values, 0.0)  # what a page holds past its end may be anything
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mass = mass * shrink + tl.sum(weights, 1)
        peak = new_peak
    tl.store(out + source, acc / tl.where(mass > 0, mass, 1.0)[:, None], mask=inside)


def _stages(row_bytes: int) -> int:
    """Return how many pages are on their way at once: as many as fit beside the tile in shared memory."""
    return 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1


def prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return [T, Hq, D] the attention of all chunks' queries.

    Args:
        q: [T, Hq, D], chunk after chunk.
        k_pages, v_pages: [blocks, Hkv, P, D], P at least 16.
        tables: [S, pages] int32, the blocks of each table row.
        window: how many of the last keys count; 0 is all.
        soft_cap: logits x become cap tanh(x / cap); 0 is off.
    """
    _, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    out = torch.empty_like(q)
    _prefill_kernel[(len(chunks.tile_chunks), heads)](
        q, k_pages, v_pages, tables, chunks.begins, chunks.starts, chunks.table_rows, chunks.tile_chunks,
        chunks.tile_numbers, out, tables.stride(0), scale, soft_cap, window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=padded(dim), PAGE=page, TILE=TILE, CAPPED=soft_cap > 0,
        num_warps=4, num_stages=_stages(dim * q.element_size()),
    )  # fmt: skip
    return out
