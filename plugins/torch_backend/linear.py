"""Linear layers, in the layout that is fastest where they run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]  # [T, in] to [T, out]


class PlainLinear:
    """A linear layer as PyTorch has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A linear layer on a CPU whose weight is laid out once the way oneDNN reads it.

    One layout serves every number of tokens. Against `torch.nn.functional.linear` in float32 it
    took half the time for one token and 40% of it for eight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = _ops()._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _ops()._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Head:
    """The last linear layer, whose results are float32: in bfloat16 logits of 20 are rounded by 0.06.

    Attributes:
        own_bytes: what it holds beyond the weight that it was made from.
    """

    def __init__(self, weight: Tensor, kind: type[PlainLinear] | type[PackedLinear]) -> None:
        self.own_bytes = 0
        self._weight = weight  # [V, C]
        self._linear: Linear | None = None
        if weight.device.type == "cpu":  # no product there takes bfloat16 and gives float32
            wide = weight.float()
            self._linear = kind(wide)
            self.own_bytes = 0 if wide is weight and kind is PlainLinear else wide.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._linear is not None:
            return self._linear(x.float())
        if x.dtype is torch.float32:
            return functional.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)


def linear_kind(device: torch.device, dtype: torch.dtype) -> type[PlainLinear] | type[PackedLinear]:
    """Return the fastest kind that works here.

    The operators under the packed kind are PyTorch's own but not part of its public interface, so
    they are tried out on a small product first.
    """
    if device.type != "cpu":
        return PlainLinear
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 16, generator=generator).to(dtype)
    x = torch.randn(3, 16, generator=generator).to(dtype)
    try:
        packed = PackedLinear(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return PlainLinear
    close = torch.allclose(packed, PlainLinear(weight)(x), rtol=0.02, atol=1e-5 if dtype is torch.float32 else 0.05)
    return PackedLinear if close else PlainLinear


def _ops() -> torch._ops._OpNamespace:
    return torch.ops.mkldnn
