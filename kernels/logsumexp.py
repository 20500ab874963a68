"""Log-sum-exp of each row as peak + log, in blocks of fixed width that are joined in fixed order:

    b-th block:  m_b = max x,  s_b = sum exp(x - m_b)
    row:         m = max m_b,  log = log sum_b s_b exp(m_b - m)

(the online normaliser of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import BLOCK, MAX_BLOCKS, blocks, check_logits, floats, ints, jit, settings
from slotline.kernels.ordering import invalid
from slotline.kernels.results import LogSums


@jit
def block_sum(x: tl.tensor) -> tl.tensor:
    """Return the largest of a block, and the sum of exp(x - largest); 0 if all are -inf."""
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(tl.exp(x - base), 0)


@jit
def join(peaks: tl.tensor, sums: tl.tensor, bad: tl.tensor) -> tl.tensor:
    """Return the row's peak, log and status from those of its blocks."""
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(sums * tl.exp(peaks - base), 0)
    state = tl.where(tl.max(bad, 0) != 0, 2, tl.where(peak == float("-inf"), 1, 0))
    log = tl.where(state == 0, tl.log(tl.maximum(total, 1.0)), float("nan"))
    return peak, log, state


@jit
def _blocks_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    peaks: tl.tensor,
    sums: tl.tensor,
    flags: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    place = row * tl.num_programs(1) + block
    wrong = invalid(x)
    peak, total = block_sum(tl.where(wrong, float("-inf"), x))
    tl.store(peaks + place, peak)
    tl.store(sums + place, total)
    tl.store(flags + place, tl.max(wrong.to(tl.int32), 0))


@jit
def _rows_kernel(
    block_peaks: tl.tensor,
    block_sums: tl.tensor,
    flags: tl.tensor,
    peaks: tl.tensor,
    logs: tl.tensor,
    status: tl.tensor,
    count: int,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    place, inside = row * count + lane, lane < count
    part = tl.load(block_peaks + place, mask=inside, other=float("-inf"))
    sums, bad = tl.load(block_sums + place, mask=inside, other=0.0), tl.load(flags + place, mask=inside, other=0)
    peak, log, state = join(part, sums, bad)
    tl.store(peaks + row, peak)
    tl.store(logs + row, log)
    tl.store(status + row, state)


def logsumexp(logits: Tensor) -> LogSums:
    """Return the log-sum-exp of each row.

    Args:
        logits: [R, V] float32.
    """
    rows, vocab = check_logits(logits)
    count, device = blocks(vocab), logits.device
    parts = floats(device, rows, count), floats(device, rows, count), ints(device, rows, count)
    out = LogSums(floats(device, rows), floats(device, rows), ints(device, rows))
    _blocks_kernel[(rows, count)](logits, logits.stride(0), vocab, *parts, BLOCK=BLOCK, **settings("pass"))
    _rows_kernel[(rows,)](*parts, *out, count, WIDTH=MAX_BLOCKS, **settings("scalar"))
    return out
