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

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit, padded

LOG2E = 1.4426950408889634
TILE = 128  # queries a program


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which queries belong together: R chunks, their tiles in the order to start them.

    Attributes:
        begins: [R + 1] int32, the chunk's queries are ``begins[r] .. begins[r + 1]``.
        starts: [R] int32, position of its first query.
        table_rows: [R] int32, its table row.
        tile_chunks, tile_numbers: [tiles] int32; of no chunk (-1), a tile is passed over.
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
def _pages(
    query: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    top: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    scale: float,
    cap: float,
    window: int,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return peak [M], mass [M] and sum [M, D] with pages first .. last added; unmasked, all queries see all keys."""
    dim, key = tl.arange(0, DIM_PAD), tl.arange(0, PAGE)
    block = tl.load(table + first, mask=first < last, other=0)
    for page in range(first, last):
        base = block.to(tl.int64) * (KV_HEADS * PAGE * DIM)
        block = tl.load(table + page + 1, mask=page + 1 < last, other=0)  # read ahead, so that pages can be, too
        at = page * PAGE + key
        held = (dim < DIM)[None, :]
        if MASKED:  # what a page holds past its end may be anything; left out in the load, it costs nothing more
            held = held & (at < top)[:, None]
        across = key[None, :] * DIM + dim[:, None]
        keys = tl.load(k_head + base + across, mask=(dim < DIM)[:, None], other=0.0)  # [D, P]
        values = tl.load(v_head + base + key[:, None] * DIM + dim[None, :], mask=held, other=0.0)
        logits = tl.dot(query, keys, input_precision="ieee")  # [M, P]
        if CAPPED:
            ratio = logits * scale / cap
            logits = cap * 1.4426950408889634 * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)  # tanh
        else:
            logits = logits * scale
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        under = new_peak
        if WINDOWED:  # a query may have seen no key yet
            under = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - under)
        weights = tl.exp2(logits - under[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return peak, mass, acc


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
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    ALIKE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    head, tile = tl.program_id(0), tl.program_id(1) // PARTS
    release(DEPENDENT)
    wait(DEPENDENT)
    chunk = tl.load(tile_chunks + tile)
    if chunk < 0:
        return
    number = tl.load(tile_numbers + tile) * PARTS + tl.program_id(1) % PARTS
    begin, end = tl.load(begins + chunk), tl.load(begins + chunk + 1)
    if number * TILE >= end - begin:
        return
    start = tl.load(starts + chunk)
    line, dim = tl.arange(0, TILE), tl.arange(0, DIM_PAD)
    token = number * TILE + line
    lowest = start + number * TILE  # position of the tile's first query
    source = ((begin + token).to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    inside = (token < end - begin)[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + source, mask=inside, other=0.0)  # [M, D]
    table = tables + tl.load(table_rows + chunk).to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    k_head, v_head = k_pages + kv_head * (PAGE * DIM), v_pages + kv_head * (PAGE * DIM)
    top = tl.minimum(lowest + TILE, start + end - begin)  # keys that some query of the tile sees
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DIM_PAD), tl.float32)
    end_page = (top + PAGE - 1) // PAGE
    oldest = tl.maximum(lowest - window + 1, 0) if WINDOWED else 0
    if ALIKE:  # which pages the tile could take unmasked depends on where it begins
        peak, mass, acc = _pages(
            query, k_head, v_head, table, start + token, oldest // PAGE, end_page, top, peak, mass, acc,
            scale, cap, window, KV_HEADS, DIM, DIM_PAD, PAGE, CAPPED, WINDOWED, True,
        )  # fmt: skip
    else:
        whole = (lowest + 1) // PAGE  # pages that all queries see up to their last key
        first = 0
        if WINDOWED:
            first = tl.minimum((tl.maximum(lowest + TILE - window, 0) + PAGE - 1) // PAGE, whole)
            peak, mass, acc = _pages(
                query, k_head, v_head, table, start + token, oldest // PAGE, first, top, peak, mass, acc,
                scale, cap, window, KV_HEADS, DIM, DIM_PAD, PAGE, CAPPED, WINDOWED, True,
            )  # fmt: skip
            whole = tl.maximum(whole, oldest // PAGE)
        peak, mass, acc = _pages(
            query, k_head, v_head, table, start + token, first, whole, top, peak, mass, acc,
            scale, cap, window, KV_HEADS, DIM, DIM_PAD, PAGE, CAPPED, WINDOWED, False,
        )  # fmt: skip
        peak, mass, acc = _pages(
            query, k_head, v_head, table, start + token, whole, end_page, top, peak, mass, acc,
            scale, cap, window, KV_HEADS, DIM, DIM_PAD, PAGE, CAPPED, WINDOWED, True,
        )  # fmt: skip
    tl.store(out + source, acc / tl.where(mass > 0, mass, 1.0)[:, None], mask=inside)


def _settings(dim: int, size: int) -> dict[str, int]:
    """Return how many parts a tile is taken in, warps, and stages.

    Measured on one H200: two small programs side by side beat one large one, since one multiplies while the other
    takes exponentials. Without matrix units, the smallest tile keeps the program short.
    """
    if size > 2:
        return {"PARTS": 8, "num_warps": 4, "num_stages": 2 if dim <= 128 else 1}
    if dim > 128:
        return {"PARTS": 2, "num_warps": 4, "num_stages": 2}
    return {"PARTS": 2, "num_warps": 4, "num_stages": 3}


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
    out: Tensor | None = None,
    alike: bool = False,
    dependent: bool = False,
) -> Tensor:
    """Return [T, Hq, D] the attention of all chunks' queries.

    Args:
        q: [T, Hq, D], chunk after chunk.
        k_pages, v_pages: [blocks, Hkv, P, D], P at least 16.
        tables: [S, pages] int32, the blocks of each table row.
        window: how many of the last keys count; 0 is all.
        soft_cap: logits x become cap tanh(x / cap); 0 is off.
        out: where to write it, contiguous; a new tensor unless given.
        alike: do it in one way for all queries, so that one has the same bits in any chunk.
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    _, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    out = torch.empty_like(q) if out is None else out
    settings = _settings(dim, q.element_size())
    parts = settings["PARTS"]
    _prefill_kernel[(heads, len(chunks.tile_chunks) * parts)](
        q, k_pages, v_pages, tables, chunks.begins, chunks.starts, chunks.table_rows, chunks.tile_chunks,
        chunks.tile_numbers, out, tables.stride(0), scale if soft_cap else scale * LOG2E, soft_cap, window,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=padded(dim), PAGE=page, TILE=TILE // parts,
        CAPPED=soft_cap > 0, WINDOWED=window > 0, ALIKE=alike, **settings, **launching(dependent, q.device),
    )  # fmt: skip
    return out
