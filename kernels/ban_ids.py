"""Rule out listed ids, as bad words of one token or the ends of begun ones, or stop ids before the minimum length.

x[r, i] <- -inf for i in ids[indptr[r] .. indptr[r + 1]], if position[r] < until[r] where these are given.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import LIST, check_columns, check_logits, jit, settings
from slotline.kernels.ordering import ruled_out


@jit
def _ban_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    indptr: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    until: tl.tensor,
    TIMED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    if TIMED:
        early = tl.load(positions + row) < tl.load(until + row)
        stop = tl.where(early, stop, start)
    for at in range(start, stop, WIDTH):
        entries = at + tl.arange(0, WIDTH)
        listed = tl.load(ids + entries, mask=entries < stop, other=-1)
        inside = (listed >= 0) & (listed < vocab)
        place = logits + row.to(tl.int64) * stride + listed
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, ruled_out(x), mask=inside)


def ban_ids(
    logits: Tensor, indptr: Tensor, ids: Tensor, positions: Tensor | None = None, until: Tensor | None = None
) -> None:
    """Rule ids out in place; ids outside 0 .. V - 1 are passed over.

    Args:
        logits: [R, V] float32.
        indptr: [R + 1] int32 and
        ids: [E] int32, each row's list (CSR); an empty list costs nothing.
        positions: [R] int64, absolute position of the token that is sampled, and
        until: [R] int64, the first position where the list does not count any more; both or neither.
    """
    rows, vocab = check_logits(logits)
    check_columns(rows + 1, logits.device, indptr=(indptr, torch.int32))
    check_columns(len(ids), logits.device, ids=(ids, torch.int32))
    timed = positions is not None and until is not None
    if positions is not None and until is not None:
        check_columns(rows, logits.device, positions=(positions, torch.int64), until=(until, torch.int64))
    elif positions is not until:
        raise ValueError("positions and until go together")
    args = (logits, logits.stride(0), vocab, indptr, ids, positions, until)
    _ban_kernel[(rows,)](*args, TIMED=timed, WIDTH=LIST, **settings("list"))
