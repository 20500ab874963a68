"""QK-norm, rotary embedding, and the KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.rms_norm import normalised
from slotline.kernels.rotate_and_store import HeadNorms


def rotate_and_store(
    qkv: Tensor,
    angles: Tensor,
    positions: Tensor,
    places: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    norms: HeadNorms | None = None,
    *,
    keep: bool = False,
    alike: bool = False,
    dependent: bool = False,
) -> Tensor:
    """Return q [T, Hq, D], rotated; write k, rotated, and v to their pages."""
    _, kv_heads, page, dim = k_pages.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    parts = qkv.reshape(len(qkv), -1, dim)  # [T, Hq + 2 Hkv, D]
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    if norms is not None:
        q, k = normalised(q, norms.q, norms.eps), normalised(k, norms.k, norms.eps)
    turn = angles[positions.long(), None]  # [T, 1, D]
    q, k = _rotate(q, turn), _rotate(k, turn)
    blocks, offsets = places.long() // page, places.long() % page
    k_pages[blocks, :, offsets] = k
    v_pages[blocks, :, offsets] = v
    if keep:
        parts[:, heads : heads + kv_heads] = k
    return q


def _rotate(heads: Tensor, turn: Tensor) -> Tensor:
    (first, second), (cos, sin) = heads.float().chunk(2, -1), turn.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)
