"""Attention of one new token a row over its pages."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.paged_attention import SPLIT, WorkList


def list_splits(lengths: Tensor, capacity: int, window: int = 0, split: int = SPLIT) -> WorkList:
    """Return the work list of rows with these lengths."""
    oldest = (lengths - window).clamp(min=0) if window else torch.zeros_like(lengths)
    counts = torch.where(lengths > 0, (lengths + split - 1) // split - oldest // split, 0)
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), counts)
    return WorkList(first, torch.nn.functional.pad(rows, (0, capacity - len(rows))).int(), split)


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
) -> Tensor:
    """Return [B, Hq, D] the attention of one query a row."""
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        if not length:
            continue
        blocks = tables[int(table_rows[b])][: -(-length // k_pages.shape[2])]
        k, v = gather(k_pages, blocks, length), gather(v_pages, blocks, length)
        seen = torch.arange(length, device=q.device) >= (length - window if window else 0)
        out[b] = attend(q[b, :, None], k, v, seen[None], scale, soft_cap)[:, 0]
    return out
