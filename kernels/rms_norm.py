"""Root mean square normalisation, with the residual sum in front of it:

    r <- r + x        y = w * x / sqrt(mean(x^2) + eps)

One program a row; x may come in parts that are added up first, as a product leaves them. The sum is rounded to the
model's dtype before the variance, and the normalised row before the weight, as transformers does; sums are float32.
Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit, padded


@jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride: int,
    part_stride: int,
    eps: float,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    release(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    gain = tl.load(weight + lane, mask=inside, other=0.0)
    wait(DEPENDENT)
    value = tl.load(x + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * part_stride + row * stride + lane, mask=inside, other=0.0)
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if ADD:
        place = residual + row * WIDTH + lane
        value = (value + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    normal = (value * scale).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + lane, (normal.to(tl.float32) * gain.to(tl.float32)), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, dependent: bool = False
) -> Tensor:
    """Return the normalised rows; ``residual`` becomes its sum with ``x``, which is what is normalised then.

    Args:
        x: [T, H], rows may be strided; or [S, T, H] in float32, which are added up and rounded to the weight's dtype.
        weight: [H].
        residual: [T, H], changed in place.
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    rows, width = x.shape[-2:]
    parts = len(x) if x.dim() == 3 else 1
    out = torch.empty((rows, width), dtype=weight.dtype if x.dim() == 3 else x.dtype, device=x.device)
    block = padded(width)
    warps = min(max(block // 512, 1), 8)
    _norm_kernel[(rows,)](
        x, residual if residual is not None else x, weight, out, x.stride(-2), x.stride(0), eps,
        PARTS=parts, WIDTH=width, BLOCK=block, ADD=residual is not None, num_warps=warps,
        **launching(dependent, x.device),
    )  # fmt: skip
    return out
