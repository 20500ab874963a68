"""The product with one order of sums is the product; that a row has its bits in any company is `test_bits`'s."""

import os

import pytest
import torch

from slotline.kernels.gemm import gemm
from slotline.kernels.reference.gemm import gemm as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 40, 24), (3, 130, 200), (70, 128, 64)]
SIZES = SHAPES if INTERPRETED else [*SHAPES, (257, 4096, 1024), (5, 1024, 3072)]


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "columns"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(rows, width, columns, biased, dtype, device):
    x, weight = (
        draw(rows, columns, dtype=dtype, device=device, seed=1),
        draw(width, columns, dtype=dtype, device=device, seed=2),
    )
    bias = draw(width, dtype=dtype, device=device, seed=3) if biased else None
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}[dtype] * columns**0.5 / 8
    torch.testing.assert_close(gemm(x, weight, bias), reference(x, weight, bias), rtol=2e-2, atol=tolerance)
    whole = gemm(x, weight, bias, out_dtype=torch.float32)
    assert whole.dtype is torch.float32
    torch.testing.assert_close(whole, reference(x, weight, bias, out_dtype=torch.float32), rtol=1e-3, atol=2e-3)
