"""Add listed biases: x[r, ids[e]] <- x[r, ids[e]] + values[e] for e in indptr[r] .. indptr[r + 1]."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import LIST, check_columns, check_logits, jit, settings


@jit
def _bias_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    indptr: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    for at in range(start, stop, WIDTH):
        entries = at + tl.arange(0, WIDTH)
        listed = tl.load(ids + entries, mask=entries < stop, other=-1)
        inside = (listed >= 0) & (listed < vocab)
        place = logits + row.to(tl.int64) * stride + listed
        bias = tl.load(values + entries, mask=inside, other=0.0)
        tl.store(place, tl.load(place, mask=inside, other=0.0) + bias, mask=inside)


def add_bias(logits: Tensor, indptr: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add biases in place; ids outside 0 .. V - 1 are passed over.

    Args:
        logits: [R, V] float32.
        indptr: [R + 1] int32,
        ids: [E] int32, each at most once a row, and
        values: [E] float32, each row's list (CSR); an empty list costs nothing.
    """
    rows, vocab = check_logits(logits)
    check_columns(rows + 1, logits.device, indptr=(indptr, torch.int32))
    check_columns(len(ids), logits.device, ids=(ids, torch.int32), values=(values, torch.float32))
    args = (logits, logits.stride(0), vocab, indptr, ids, values)
    _bias_kernel[(rows,)](*args, WIDTH=LIST, **settings("list"))
