"""Rule out what a packed mask does not allow: x[i] <- -inf where bit i mod 32 of word i div 32 is 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, blocks, check_columns, check_logits, jit, settings
from slotline.kernels.ordering import ruled_out


@jit
def _mask_kernel(
    logits: tl.tensor, stride: int, vocab: int, rows: tl.tensor, masks: tl.tensor, words: int, BLOCK: tl.constexpr
) -> None:
    line, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + line).to(tl.int64)
    if row >= 0:
        at = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        word = tl.load(masks + line.to(tl.int64) * words + at, mask=at < words, other=0)
        bit = tl.arange(0, 32)
        ids = at[:, None] * 32 + bit[None, :]  # [BLOCK / 32, 32]
        place = logits + row * stride + ids
        x = tl.load(place, mask=ids < vocab, other=0.0)
        allowed = ((word[:, None] >> bit[None, :]) & 1) != 0
        tl.store(place, tl.where(allowed, x, ruled_out(x)), mask=ids < vocab)


def mask_allowed(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Apply masks in place.

    Args:
        logits: [R, V] float32.
        masks: [M, ceil(V / 32)] int32, the bits of packed uint32 words; bits past V mean nothing.
        rows: [M] int32, which row each mask is for; -1 is for none, and costs nothing.
    """
    _, vocab = check_logits(logits)
    words = triton.cdiv(vocab, 32)
    check_columns(len(masks), logits.device, rows=(rows, torch.int32))
    if masks.shape[1:] != (words,) or masks.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(f"masks must be contiguous int32 [M, {words}], not {masks.dtype} {tuple(masks.shape)}")
    if len(masks):
        grid = (len(masks), blocks(vocab))
        _mask_kernel[grid](logits, logits.stride(0), vocab, rows, masks, words, BLOCK=BLOCK, **settings("pass"))
