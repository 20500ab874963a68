"""Write single words of the row state: state[places[i]] <- values[i], places counted over all lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.launch import LIST, check_columns, settings, varying


@varying("count")
def _write_kernel(state: tl.tensor, places: tl.tensor, values: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    place = tl.load(places + lane, mask=inside, other=0)
    tl.store(state + place, tl.load(values + lane, mask=inside, other=0), mask=inside)


def write_words(state: Tensor, places: Tensor, values: Tensor) -> None:
    """Write words in place.

    Args:
        state: [S, W] int32, contiguous.
        places: [N] int32, line * W + word, each at most once.
        values: [N] int32.
    """
    count = len(places)
    check_columns(count, state.device, places=(places, torch.int32), values=(values, torch.int32))
    if count:
        grid = (triton.cdiv(count, LIST),)
        _write_kernel[grid](state, places, values, count, BLOCK=LIST, **settings("list"))
