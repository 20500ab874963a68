"""Linear layers with int8 weights on a CPU: every row by its own scale, sums of integers, no bits from company.

A row of activations is divided by its largest magnitude and written with two int8 digits, as two
rows of one integer product; scaled and added, they give the row's result. One digit would not do:
a few channels of the residual stream are a hundred times larger than the rest, and perplexity
rises by 6% to 15%, where the second digit leaves what the weights cost. The weights are read once
for both. Integer sums do not depend on their order, so a row's result has the same bits whatever
it is computed with, which quantising a step by one scale, as `quantized.linear_dynamic` does,
would not give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from slotline.errors import ConfigError

_WEIGHT_LEVELS = 127
_BYTES_PER_CHANNEL = 12  # scale, zero point and sum of an output channel


class Product(Protocol):
    """Rows of integers as float32 times an int8 matrix with a scale for each of its rows; the sums are exact."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] float32 for [T, in], which is rounded to integers."""


# Of int8 weight [out, in], scale [out], and levels n: rows hold integers from -n to n.
ProductKind = Callable[[Tensor, Tensor, int], Product]


class FbgemmProduct:
    """FBGEMM rounds, multiplies and scales in one operator: the fastest for few rows."""

    def __init__(self, weight: Tensor, scale: Tensor, levels: int) -> None:
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            with warnings.catch_warnings():  # tensors of quantized type may go one day; the next kind needs none
                warnings.simplefilter("ignore")
                quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
            self._weight = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = before
        self._zero = levels + 1

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, self._zero, self._weight)
        return y


class OnednnProduct:
    """OneDNN takes rows that are rounded before: behind FBGEMM for few rows, ahead of it for a hundred."""

    def __init__(self, weight: Tensor, scale: Tensor, levels: int) -> None:
        self._weight = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scale = scale
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._zero = levels + 1

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.round().to(torch.int8).view(torch.uint8).add_(self._zero)  # modulo 256
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows,
            1.0,
            self._zero,
            self._weight,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y


Candidates = tuple[tuple[ProductKind, int], ...]  # kinds and their levels, the fastest first

# Up to some thousand outputs FBGEMM is ahead for 2 rows of digits and even with oneDNN for 16. For a vocabulary
# oneDNN is ahead, but far behind where the processor saturates. The choice must not depend on the number of rows:
# the two round their results differently.
_NARROW: Candidates = ((FbgemmProduct, 127), (OnednnProduct, 127), (FbgemmProduct, 63), (OnednnProduct, 63))
_WIDE: Candidates = ((OnednnProduct, 127), *_NARROW)
_WIDE_OUTPUTS = 16384


class Int8Linear:
    """A linear layer that holds its weight in int8.

    Attributes:
        nbytes: of weight, scales and bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        kind, levels = first_exact(_WIDE if len(weight) >= _WIDE_OUTPUTS else _NARROW)
        quantized, scale = quantise(weight.float())
        self._product = kind(quantized, scale / levels, levels)
        self._base = 2 * levels  # what is left of a digit is at most one half
        self._units = torch.tensor([levels, levels * self._base], dtype=torch.float32).view(2, 1, 1)
        self._bias = None if bias is None else bias.float()
        self.nbytes = quantized.nbytes + _BYTES_PER_CHANNEL * len(scale)
        if self._bias is not None:
            self.nbytes += self._bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        # A row of zeros becomes NaN, then some integers, then zero times them. A NaN comes back through the peak.
        peak = wide.abs().amax(-1, True)
        digits = wide * (self._units / peak)  # [2, T, in]
        digits[1].sub_(digits[0].round_(), alpha=self._base)
        y = self._product(digits.view(-1, wide.shape[-1]))  # [2 T, out]
        y = y[: len(wide)].add_(y[len(wide) :], alpha=1 / self._base).mul_(peak)
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 matrix [out, in] and the scale [out] that gives it back."""
    peak = weight.abs().amax(1)
    scale = torch.where(peak > 0, peak / _WEIGHT_LEVELS, 1.0)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


@cache
def first_exact(candidates: Candidates) -> tuple[ProductKind, int]:
    """Return the first candidate whose sums are exact here.

    Processors without instructions for int8 products (VNNI) add pairs of 8-bit products in 16 bits, which
    saturates; with 7-bit digits it cannot. None of the operators is part of PyTorch's public interface, so
    each is tried out on the sums that are hardest.

    Raises:
        ConfigError: there is none.
    """
    for kind, levels in candidates:
        try:
            if _exact(kind, levels):
                return kind, levels
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            continue
    raise ConfigError(
        "quantization is 'int8', but this build of PyTorch has no exact int8 product for this processor; "
        "leave quantization out"
    )


def _exact(kind: ProductKind, levels: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-_WEIGHT_LEVELS, _WEIGHT_LEVELS + 1, (48, 144), generator=generator, dtype=torch.int8)
    rows = torch.randint(-levels, levels + 1, (9, 144), generator=generator)
    weight[0], weight[1], rows[0], rows[1] = _WEIGHT_LEVELS, -_WEIGHT_LEVELS, levels, -levels
    expected = (rows @ weight.long().t()).float()
    multiply = kind(weight, torch.ones(len(weight)), levels)
    given = rows.float()
    # All sums are small enough for float32. One row and several may take different paths.
    return torch.equal(multiply(given[:1]), expected[:1]) and torch.equal(multiply(given), expected)
