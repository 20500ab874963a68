"""Linear layers with int4 weights on a CPU: 32 inputs share a scale and an offset, activations are bfloat16.

Reads a quarter of what float32 does and half of what int8 does, which is what one sequence alone waits
for. From some eight rows on the arithmetic takes longer than the reading, and int8 is ahead. A matrix
that comes from a 4-bit GGUF file with groups of 32 (Q4_0, Q4_1) loses nothing; any other is rounded to
the nearest of 16 values, which costs a small model visibly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from slotline.errors import ConfigError

GROUP = 32
_OUTPUTS = 16  # the operator takes multiples of this
_LAST = 15  # the largest of 16 values
_MIDDLE = 8  # the value that stands for the offset itself


class Int4Linear:
    """A linear layer that holds its weight in int4.

    Attributes:
        nbytes: of weight, scales, offsets and bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        _check()
        self._outputs, inputs = weight.shape
        self._missing = -inputs % GROUP
        wide = functional.pad(weight.float(), (0, self._missing, 0, -self._outputs % _OUTPUTS))
        values, self._scales = quantise(wide)
        self._weight = _pack(values)
        self._bias = None if bias is None else bias.float()
        self.nbytes = values.numel() // 2 + self._scales.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.bfloat16()  # the operator has a slow path for anything else
        if self._missing:
            rows = functional.pad(rows, (0, self._missing))
        y = torch._weight_int4pack_mm_for_cpu(rows, self._weight, GROUP, self._scales)[:, : self._outputs]
        if self._bias is not None:
            y = y.float() + self._bias
        return y.to(x.dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return [out, in] values from 0 to 15, and [in / 32, out, 2] scales and offsets."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = ((high - low) / _LAST).bfloat16()
    scale = torch.where(scale > 0, scale, 1.0)
    offset = (low + scale.float() * _MIDDLE).bfloat16()
    values = ((groups - offset.float()) / scale.float()).round_().add_(_MIDDLE).clamp_(0, _LAST)
    return values.to(torch.int32).view(weight.shape), torch.cat([scale, offset], 2).transpose(0, 1).contiguous()


def _pack(values: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(values, 1)


@cache
def _check() -> None:
    """Try the operators, which are PyTorch's own but not part of its public interface.

    Raises:
        ConfigError: they are not there, or do something else.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (3, 2 * GROUP), generator=generator).bfloat16()  # bfloat16 holds these and their sums
    values = torch.randint(0, _LAST + 1, (_OUTPUTS, 2 * GROUP), generator=generator, dtype=torch.int32)
    scales = torch.tensor([1.0, 0.0]).expand(2, _OUTPUTS, 2).bfloat16().contiguous()
    try:
        found = torch._weight_int4pack_mm_for_cpu(x, _pack(values), GROUP, scales)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        found = x.new_full((3, _OUTPUTS), float("nan"))
    expected = x.float() @ (values - _MIDDLE).float().t()
    if not torch.allclose(found.float(), expected, rtol=0.01, atol=1.0):
        raise ConfigError(
            "quantization is 'int4', but this build of PyTorch has no int4 product for this processor; "
            "use int8, or leave quantization out"
        )
