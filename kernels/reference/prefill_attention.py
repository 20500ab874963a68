"""Causal attention of prompt chunks over their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.prefill_attention import Chunks
from slotline.kernels.reference.paged_attention import attend, gather


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
    """Return [T, Hq, D] the attention of all chunks' queries."""
    out = torch.empty_like(q) if out is None else out
    begins = chunks.begins.tolist()
    for begin, end, start, row in zip(
        begins[:-1], begins[1:], chunks.starts.tolist(), chunks.table_rows.tolist(), strict=True
    ):
        length = start + end - begin
        blocks = tables[row][: -(-length // k_pages.shape[2])]
        k, v = gather(k_pages, blocks, length), gather(v_pages, blocks, length)
        position = torch.arange(start, length, device=q.device)[:, None]
        at = torch.arange(length, device=q.device)[None]
        seen = (at <= position) & ((at > position - window) if window else True)
        out[begin:end] = attend(q[begin:end].transpose(0, 1), k, v, seen, scale, soft_cap).transpose(0, 1).to(q.dtype)
    return out
