"""The best token of each row, the lowest id among equals: block by block, then the best of the blocks."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, MAX_BLOCKS, blocks, check_logits, ints, jit, longs, settings
from slotline.kernels.ordering import LOWEST_KEY, id_in, invalid, key_in, ordered_key, packed
from slotline.kernels.results import Best


@jit
def _blocks_kernel(
    logits: tl.tensor, stride: int, vocab: int, bests: tl.tensor, flags: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    place = row * tl.num_programs(1) + block
    tl.store(bests + place, tl.max(packed(ordered_key(x), ids), 0).to(tl.int64, bitcast=True))
    tl.store(flags + place, tl.max(invalid(x).to(tl.int32), 0))


@jit
def _rows_kernel(
    bests: tl.tensor, flags: tl.tensor, tokens: tl.tensor, status: tl.tensor, count: int, WIDTH: tl.constexpr
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    entry = tl.load(bests + row * count + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)
    best = tl.max(entry, 0)
    bad = tl.max(tl.load(flags + row * count + lane, mask=lane < count, other=0), 0) != 0
    state = tl.where(bad, 2, tl.where(key_in(best) < LOWEST_KEY, 1, 0))
    tl.store(tokens + row, tl.where(state == 0, id_in(best), 0))
    tl.store(status + row, state)


def argmax(logits: Tensor) -> Best:
    """Return the best token of each row.

    Args:
        logits: [R, V] float32.
    """
    rows, vocab = check_logits(logits)
    count = blocks(vocab)
    bests, flags = longs(logits.device, rows, count), ints(logits.device, rows, count)
    tokens, status = ints(logits.device, rows), ints(logits.device, rows)
    _blocks_kernel[(rows, count)](logits, logits.stride(0), vocab, bests, flags, BLOCK=BLOCK, **settings("pass"))
    _rows_kernel[(rows,)](bests, flags, tokens, status, count, WIDTH=MAX_BLOCKS, **settings("scalar"))
    return Best(tokens, status)
