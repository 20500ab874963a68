"""Write the scores that a draw was made from: s = x / T where the token is a candidate (see `Sampled`), else -inf."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, blocks, check_columns, check_logits, jit, settings
from slotline.kernels.ordering import ordered_key, score


@jit
def _drop_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    rows: tl.tensor,
    temperatures: tl.tensor,
    cut_keys: tl.tensor,
    cut_ids: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.load(rows + tl.program_id(0)), tl.program_id(1)
    if row >= 0:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            place = logits + row.to(tl.int64) * stride + ids
            s = score(tl.load(place, mask=ids < vocab, other=float("-inf")), temperature)
            key, cut = ordered_key(s), tl.load(cut_keys + row).to(tl.uint32)
            stays = (key > cut) | ((key == cut) & (ids <= tl.load(cut_ids + row)))
            tl.store(place, tl.where(stays, s, float("-inf")), mask=ids < vocab)


def drop_rest(logits: Tensor, rows: Tensor, temperature: Tensor, cut_keys: Tensor, cut_ids: Tensor) -> None:
    """Turn logits of rows into scores in place; rows that are greedy stay as they are.

    Args:
        logits: [R, V] float32, as `sample` got them.
        rows: [M] int32, the rows to change, each once; -1 is none, and costs nothing.
        temperature: [R] float32, as `sample` got it.
        cut_keys: [R] int64 and
        cut_ids: [R] int32, from `sample`.
    """
    count, vocab = check_logits(logits)
    check_columns(count, logits.device, temperature=(temperature, torch.float32))
    check_columns(count, logits.device, cut_keys=(cut_keys, torch.int64), cut_ids=(cut_ids, torch.int32))
    check_columns(len(rows), logits.device, rows=(rows, torch.int32))
    if len(rows):
        args = (logits, logits.stride(0), vocab, rows, temperature, cut_keys, cut_ids)
        _drop_kernel[(len(rows), blocks(vocab))](*args, BLOCK=BLOCK, **settings("pass"))
