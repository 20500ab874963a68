"""Linear layers, in the layout that is fastest where they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from slotline.errors import ConfigError
from slotline.plugins.torch_backend.int4 import Int4Linear
from slotline.plugins.torch_backend.int8 import Int8Linear


class Linear(Protocol):
    """A linear layer.

    Attributes:
        nbytes: of weight and bias, as it holds them.
    """

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for [T, in]."""


LinearKind = Callable[[Tensor, Tensor | None], Linear]  # of weight [out, in] and bias [out]


@dataclass(frozen=True, slots=True)
class Kinds:
    """What the layers' matrices and the head become."""

    layers: LinearKind
    head: LinearKind


# On a CPU. A head in int4 would cost more quality than all layers together.
QUANTIZED = {"int8": Kinds(Int8Linear, Int8Linear), "int4": Kinds(Int4Linear, Int8Linear)}


class PlainLinear:
    """A linear layer as PyTorch has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias  # [out]
        self.nbytes = _nbytes(weight, bias)

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
        self.nbytes = _nbytes(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _ops()._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Head:
    """The last linear layer, whose results are float32: in bfloat16 logits of 20 are rounded by 0.06.

    Attributes:
        nbytes: of what it holds beside the weight that it was made from.
        keeps_weight: it computes with that weight as it is.
    """

    def __init__(self, weight: Tensor, kind: LinearKind) -> None:
        on_cpu = weight.device.type == "cpu"  # no product there takes bfloat16 and gives float32
        wide = weight.float() if on_cpu else weight
        self._linear = kind(wide, None) if on_cpu else None
        self.keeps_weight = wide is weight and (self._linear is None or kind is PlainLinear)
        self._weight = weight if self.keeps_weight else None  # [V, C]
        self.nbytes = 0 if self.keeps_weight or self._linear is None else self._linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self._linear is not None:
            return self._linear(x.float())
        assert self._weight is not None
        if x.dtype is torch.float32:
            return functional.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)


def linear_kinds(device: torch.device, dtype: torch.dtype, quantization: str | None) -> Kinds:
    """Return the kinds that a quantization names, or the fastest that work here.

    Raises:
        ConfigError: the quantization cannot be had here.
    """
    if quantization is None:
        kind = linear_kind(device, dtype)
        return Kinds(kind, kind)
    if device.type != "cpu":
        raise ConfigError(
            f"quantization is {quantization!r}, which backend torch has on a CPU only; use device cpu, or leave it out"
        )
    return QUANTIZED[quantization]


def linear_kind(device: torch.device, dtype: torch.dtype) -> LinearKind:
    """Return the fastest kind that keeps weights as they are."""
    return PackedLinear if device.type == "cpu" and _packing_works(dtype) else PlainLinear


def _packing_works(dtype: torch.dtype) -> bool:
    """Try the operators under the packed kind: they are PyTorch's own, but not part of its public interface."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 16, generator=generator).to(dtype)
    x = torch.randn(3, 16, generator=generator).to(dtype)
    try:
        packed = PackedLinear(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    atol = 1e-5 if dtype is torch.float32 else 0.05
    return torch.allclose(packed, PlainLinear(weight)(x), rtol=0.02, atol=atol)


def _nbytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)


def _ops() -> torch._ops._OpNamespace:
    return torch.ops.mkldnn
