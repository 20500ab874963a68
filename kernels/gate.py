"""The gated activation of an MLP: act(gate) * up, with gate and up side by side in one row.

    silu(g) = g / (1 + exp(-g))        gelu(g) = g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))

act(gate) is rounded to the model's dtype before the product, as transformers does. Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotline.kernels.dependent import launching, release, wait
from slotline.kernels.launch import jit

ACTIVATIONS = ("silu", "gelu")
WIDTH = 1024  # elements a program


@jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def activated(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Return act(gate) in float32."""
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        return gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * _sigmoid(gate)


@jit
def _gate_kernel(
    both: tl.tensor,
    out: tl.tensor,
    stride: int,
    half: int,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    release(DEPENDENT)
    wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < half
    gate = tl.load(both + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * stride + half + lane, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, GELU)
    tl.store(out + row * half + lane, active.to(out.dtype.element_ty).to(tl.float32) * up, mask=inside)


def check_activation(activation: str) -> None:
    """Raise if there is no such activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")


def gate(both: Tensor, activation: str = "silu", *, dependent: bool = False) -> Tensor:
    """Return [T, F] act(gate) * up.

    Args:
        both: [T, 2 F] gate, then up; rows may be strided.
        activation: "silu" or "gelu" (the tanh form).
        dependent: launch before the kernel in front is done, see `dependent`.
    """
    check_activation(activation)
    rows, half = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, half), dtype=both.dtype, device=both.device)
    grid = (rows, triton.cdiv(half, WIDTH))
    _gate_kernel[grid](
        both, out, both.stride(0), half, BLOCK=WIDTH, GELU=activation == "gelu", num_warps=4,
        **launching(dependent, both.device),
    )  # fmt: skip
    return out
