"""Penalties on tokens that a row has seen; c = times output, in float32 and in this order:

    x <- x / r if x > 0 else x r                    where prompt or output has the token
    x <- x - f c                                    where the output has it
    x <- x - p                                      where the output has it

r: repetition (Keskar et al., "CTRL", 2019), f: frequency, p: presence (as in OpenAI's API).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, blocks, check_columns, check_logits, jit, settings


@jit
def _penalise_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    seen: tl.tensor,
    seen_stride: int,
    slots: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        times = tl.load(seen + slot * seen_stride + ids, mask=ids < vocab, other=0)
        place = logits + row.to(tl.int64) * stride + ids
        x = tl.load(place, mask=times != 0, other=0.0)
        factor = tl.broadcast_to(tl.load(repetition + row), [BLOCK])
        count = (times >> 1).to(tl.float32)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.load(frequency + row) * count
        x = x - tl.load(presence + row) * (count > 0).to(tl.float32)
        tl.store(place, x, mask=times != 0)


def penalise(
    logits: Tensor, seen: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Apply penalties in place.

    Args:
        logits: [R, V] float32.
        seen: [S, V] int32, as `note_tokens` keeps it.
        slots: [R] int32, each row's place in the table; -1 has no penalties, and costs nothing.
        repetition: [R] float32 above 0, 1 is off.
        frequency: [R] float32, 0 is off.
        presence: [R] float32, 0 is off.
    """
    rows, vocab = check_logits(logits)
    numbers = {"repetition": repetition, "frequency": frequency, "presence": presence}
    check_columns(rows, logits.device, **{name: (column, torch.float32) for name, column in numbers.items()})
    check_columns(rows, logits.device, slots=(slots, torch.int32))
    if seen.dtype != torch.int32 or seen.dim() != 2 or seen.shape[1] != vocab or seen.stride(1) != 1:
        raise ValueError(f"seen must be int32 [S, {vocab}], not {seen.dtype} {tuple(seen.shape)}")
    args = (logits, logits.stride(0), vocab, seen, seen.stride(0), slots, repetition, frequency, presence)
    _penalise_kernel[(rows, blocks(vocab))](*args, BLOCK=BLOCK, **settings("pass"))
