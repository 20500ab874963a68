"""Turn a step's tokens into what the layers read: ids, places of their keys and values, lengths of rows that decode.

A token id of -1 is the one that the row sampled last. Tokens of dead rows go to block 0, and decode nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import ints, varying
from slotline.kernels.row_layout import DEAD, LAST, PAGE, TABLE

WIDTH = 128  # tokens a program


class TokenInputs(NamedTuple):
    """Three columns of int32.

    Attributes:
        ids: [T].
        places: [T] block * P + offset, where keys and values go.
        lengths: [D] keys of each row that decodes, its new one included, or 0.
    """

    ids: Tensor
    places: Tensor
    lengths: Tensor


@varying("count", "lines")
def _inputs_kernel(
    state: tl.tensor,
    stride: int,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    decoding: tl.tensor,
    ids: tl.tensor,
    places: tl.tensor,
    lengths: tl.tensor,
    count: int,
    lines: int,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = lane < count
    row = state + tl.load(slots + lane, mask=inside, other=0).to(tl.int64) * stride
    token = tl.load(tokens + lane, mask=inside, other=0)
    position = tl.load(positions + lane, mask=inside, other=0)
    alive = tl.load(row + DEAD, mask=inside, other=1) == 0
    last = tl.load(row + LAST, mask=inside & (token < 0), other=0)
    block = tl.load(row + TABLE + position // PAGE, mask=inside & alive, other=0)
    tl.store(ids + lane, tl.where(token < 0, last, token), mask=inside)
    tl.store(places + lane, block * PAGE + position % PAGE, mask=inside)
    decodes = (lane < tl.load(decoding)) & alive
    tl.store(lengths + lane, tl.where(decodes, position + 1, 0), mask=inside & (lane < lines))


def token_inputs(
    state: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, decoding: Tensor, lines: int
) -> TokenInputs:
    """Return the inputs of T tokens.

    Args:
        state: [S, W] int32, see `row_layout`.
        tokens: [T] int32, -1 is what the row sampled last.
        positions: [T] int32 in the sequence.
        slots: [T] int32, the line of the row that each belongs to.
        decoding: [1] int32, how many tokens at the front are rows with one token each.
        lines: D, the most that these can be.
    """
    count, device = len(tokens), state.device
    out = TokenInputs(ints(device, count), ints(device, count), ints(device, lines))
    args = (state, state.stride(0), tokens, positions, slots, decoding, *out, count, lines)
    _inputs_kernel[(triton.cdiv(count, WIDTH),)](*args, PAGE=PAGE, WIDTH=WIDTH, num_warps=4)
    return out
