"""What stands between the qkv projection and attention, in one launch: QK-norm, rotary embedding, and the KV write.

For each head of q and k (after its RMS norm, where the model has one), with halves a and b and its position's angle:

    (a, b) -> (a cos - b sin, b cos + a sin)

q goes to a tensor of its own; k, and v as it is, go to their page. One program per token and head.
Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit, padded


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over single heads: weights [D] for q and k."""

    q: Tensor
    k: Tensor
    eps: float


@jit
def _normed(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    eps: float,
    HALF: tl.constexpr,
    LIKE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
    low = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)
    first = ((first * scale).to(LIKE).to(tl.float32) * low).to(LIKE).to(tl.float32)
    second = ((second * scale).to(LIKE).to(tl.float32) * high).to(LIKE).to(tl.float32)
    return first, second


@jit
def _rotate_kernel(
    qkv: tl.tensor,
    angles: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    q_out: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    stride: int,
    eps: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    release(DEPENDENT)
    wait(DEPENDENT)
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    LIKE: tl.constexpr = qkv.dtype.element_ty
    source = qkv + token.to(tl.int64) * stride + head * 2 * HALF + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            weight = q_weight if head < HEADS else k_weight
            first, second = _normed(first, second, weight, lane, inside, eps, HALF, LIKE)
        turn = angles + tl.load(positions + token).to(tl.int64) * 2 * HALF + lane
        cos = tl.load(turn, mask=inside, other=0.0)
        sin = tl.load(turn + HALF, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < HEADS:
        target = q_out + (token.to(tl.int64) * HEADS + head) * 2 * HALF + lane
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        place = tl.load(places + token).to(tl.int64)
        kv_head = (head - HEADS) % KV_HEADS
        offset = ((place // PAGE * KV_HEADS + kv_head) * PAGE + place % PAGE) * 2 * HALF + lane
        pages = k_pages if head < HEADS + KV_HEADS else v_pages
        tl.store(pages + offset, first, mask=inside)
        tl.store(pages + offset + HALF, second, mask=inside)


def rotate_and_store(
    qkv: Tensor,
    angles: Tensor,
    positions: Tensor,
    places: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    norms: HeadNorms | None = None,
    *,
    dependent: bool = False,
) -> Tensor:
    """Return q [T, Hq, D], rotated; write k, rotated, and v to their pages.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], rows may be strided.
        angles: [positions, D] float32, cosines, then sines.
        positions: [T] of each token in its sequence.
        places: [T] block * P + offset, where its k and v go.
        k_pages, v_pages: [blocks, Hkv, P, D], changed in place.
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    _, kv_heads, page, dim = k_pages.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    weights = (norms.q, norms.k, norms.eps) if norms is not None else (qkv, qkv, 0.0)
    _rotate_kernel[(tokens, heads + 2 * kv_heads)](
        qkv, angles, positions, places, out, k_pages, v_pages, weights[0], weights[1], qkv.stride(0), weights[2],
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=padded(dim // 2), PAGE=page, NORM=norms is not None,
        num_warps=1, **launching(dependent, qkv.device),
    )  # fmt: skip
    return out
