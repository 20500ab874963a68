"""What stands between the qkv projection and attention, in one launch: QK-norm, rotary embedding, and the KV write.

For each head of q and k (after its RMS norm, where the model has one), with halves a and b and its position's angle:

    (a, b) -> (a cos - b sin, b cos + a sin)

q goes to a tensor of its own; k, and v as it is, go to their page. A program takes one head of a token where tokens are
few, which ends soonest, and of several where they are many: small programs by the ten thousand take ten times as long.
Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit, padded, varying

FEW = 16  # tokens
HALVES = 512  # elements of the halves of heads that a program takes where tokens are more


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
    """Return the halves [tokens, lanes] of heads, each head divided by its root mean square and times the weight."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    low = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + HALF + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = ((first * scale).to(LIKE).to(tl.float32) * low).to(LIKE).to(tl.float32)
    second = ((second * scale).to(LIKE).to(tl.float32) * high).to(LIKE).to(tl.float32)
    return first, second


@varying("tokens")
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
    tokens: int,
    eps: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    TAKEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    release(DEPENDENT)
    wait(DEPENDENT)
    token = (tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    LIKE: tl.constexpr = qkv.dtype.element_ty
    real = token < tokens
    there = real[:, None] & (lane < HALF)[None, :]
    source = qkv + token[:, None] * stride + head * 2 * HALF + lane[None, :]  # [TAKEN, BLOCK]
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    place = tl.load(places + token, mask=real, other=0).to(tl.int64)
    row = (place // PAGE * KV_HEADS + (head - HEADS) % KV_HEADS) * PAGE + place % PAGE
    stored = row[:, None] * 2 * HALF + lane[None, :]
    if head >= HEADS + KV_HEADS:
        tl.store(v_pages + stored, first, mask=there)
        tl.store(v_pages + stored + HALF, second, mask=there)
    else:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            weight = k_weight
            if head < HEADS:
                weight = q_weight
            low, high = _normed(low, high, weight, lane, lane < HALF, eps, HALF, LIKE)
        turn = angles + tl.load(positions + token, mask=real, other=0).to(tl.int64)[:, None] * 2 * HALF + lane[None, :]
        cos = tl.load(turn, mask=there, other=0.0)
        sin = tl.load(turn + HALF, mask=there, other=0.0)
        low, high = low * cos - high * sin, high * cos + low * sin
        if head < HEADS:
            target = q_out + (token[:, None] * HEADS + head) * 2 * HALF + lane[None, :]
            tl.store(target, low, mask=there)
            tl.store(target + HALF, high, mask=there)
        else:
            if KEEP:
                tl.store(source, low, mask=there)
                tl.store(source + HALF, high, mask=there)
            tl.store(k_pages + stored, low, mask=there)
            tl.store(k_pages + stored + HALF, high, mask=there)


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
    """Return q [T, Hq, D], rotated; write k, rotated, and v to their pages.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], rows may be strided.
        angles: [positions, D] float32, cosines, then sines.
        positions: [T] of each token in its sequence.
        places: [T] block * P + offset, where its k and v go.
        k_pages, v_pages: [blocks, Hkv, P, D], changed in place.
        keep: write k, rotated, to ``qkv`` as well.
        alike: do it in one way for any number of tokens, so that a token has the same bits in any company.
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    _, kv_heads, page, dim = k_pages.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    weights = (norms.q, norms.k, norms.eps) if norms is not None else (qkv, qkv, 0.0)
    block = padded(dim // 2)
    taken = 1 if tokens <= FEW and not alike else max(HALVES // block, 1)
    _rotate_kernel[(triton.cdiv(tokens, taken), heads + 2 * kv_heads)](
        qkv, angles, positions, places, out, k_pages, v_pages, weights[0], weights[1], qkv.stride(0), tokens,
        weights[2], HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=block, PAGE=page, NORM=norms is not None,
        KEEP=keep, TAKEN=taken, num_warps=1 if taken == 1 else 4, **launching(dependent, qkv.device),
    )  # fmt: skip
    return out
