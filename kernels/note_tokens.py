"""Keep the table of seen tokens that penalties read: seen[s, i] = 2 (times i was output) + (1 if the prompt has i)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import LIST, check_columns, settings, varying


@varying("count")
def _note_kernel(
    seen: tl.tensor,
    stride: int,
    vocab: int,
    slots: tl.tensor,
    tokens: tl.tensor,
    count: int,
    OUTPUT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    entries = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    slot = tl.load(slots + entries, mask=entries < count, other=-1).to(tl.int64)
    token = tl.load(tokens + entries, mask=entries < count, other=-1)
    inside = (slot >= 0) & (token >= 0) & (token < vocab)
    place = seen + slot * stride + token
    if OUTPUT:
        tl.atomic_add(place, 2, mask=inside)
    else:
        tl.atomic_or(place, 1, mask=inside)


def note_tokens(seen: Tensor, slots: Tensor, tokens: Tensor, *, output: bool) -> None:
    """Note tokens in place; a row of the table is set to zero before its first.

    Args:
        seen: [S, V] int32.
        slots: [T] int32, the table's row for each token; -1 notes nothing.
        tokens: [T] int32.
        output: whether they were sampled; otherwise they are the prompt's.
    """
    count = len(tokens)
    check_columns(count, seen.device, slots=(slots, torch.int32), tokens=(tokens, torch.int32))
    if seen.dtype != torch.int32 or seen.dim() != 2 or seen.stride(1) != 1:
        raise ValueError(f"seen must be int32 [S, V], not {seen.dtype} {tuple(seen.shape)}")
    if count:
        args = (seen, seen.stride(0), seen.shape[1], slots, tokens, count)
        _note_kernel[(triton.cdiv(count, LIST),)](*args, OUTPUT=output, WIDTH=LIST, **settings("list"))
