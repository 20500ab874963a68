"""Attention of one new token a row over its pages."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.paged_attention import EVEN, MAX_KV_HEADS, UNIT, Cut, WorkList


def list_splits(
    lengths: Tensor,
    capacity: int,
    window: int = 0,
    cut: Cut = EVEN,
    table_rows: Tensor | None = None,
) -> WorkList:
    """Return the work list of rows with these lengths, the longest first."""
    items = torch.zeros((capacity, 4), dtype=torch.int32, device=lengths.device)
    total, split, counts = 0, cut.split, lengths.tolist()
    if cut.spread:
        keys = sum(min(length, window) if window else length for length in counts)
        split = max(split, -(-keys // (cut.spread * UNIT)) * UNIT)
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        length = counts[row]
        first = max(length - window, 0) // split if window else 0
        units = -(-length // split) - first
        each = -(-units // cut.most) if cut.most else 1
        table_row = -1 if table_rows is None else int(table_rows[row])
        for unit in range(first, first + units, max(each, 1)):
            items[total] = torch.tensor([row, unit * split, length, table_row])
            total += 1
    arrived = torch.zeros((len(lengths), MAX_KV_HEADS), dtype=torch.int32, device=lengths.device)
    count = torch.tensor([total, split], dtype=torch.int32, device=lengths.device)
    return WorkList(items, count, arrived, cut.most, table_rows is not None)


def gather(pages: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return [Hkv, length, D] what a table's pages hold."""
    return pages[blocks.long()].transpose(0, 1).flatten(1, 2)[:, :length]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float) -> Tensor:
    """Return [Hq, M, D] in float32; q [Hq, M, D], k and v [Hkv, L, D], mask [M, L] of what is seen."""
    group = q.shape[0] // k.shape[0]
    k, v = (t.float().repeat_interleave(group, 0) for t in (k, v))
    logits = q.float() @ k.transpose(1, 2) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return torch.softmax(logits.masked_fill(~mask, float("-inf")), -1) @ v


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    lengths: Tensor,
    work: WorkList,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Return [B, Hq, D] the attention of one query a row."""
    out = torch.zeros_like(q) if out is None else out
    for b, length in enumerate(lengths.tolist()):
        if not length:
            continue
        blocks = tables[int(table_rows[b])][: -(-length // k_pages.shape[2])]
        k, v = gather(k_pages, blocks, length), gather(v_pages, blocks, length)
        seen = torch.arange(length, device=q.device) >= (length - window if window else 0)
        out[b] = attend(q[b, :, None], k, v, seen[None], scale, soft_cap)[:, 0]
    return out
