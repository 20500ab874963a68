"""What the deterministic mode stands on: rows and queries have the same bits in any company. Compiled only.

The interpreter's products come from a library that minds where in a tile a row lies.
"""

import pytest
import torch

from slotline.kernels.gemm import gemm
from slotline.kernels.prefill_attention import list_tiles, prefill_attention
from slotline.kernels.row_layout import PAGE

pytestmark = pytest.mark.gpu


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_of_a_product(dtype, device):
    x, weight = draw(70, 200, dtype=dtype, device=device, seed=1), draw(130, 200, dtype=dtype, device=device, seed=2)
    together = gemm(x, weight)
    for begin, end in ((0, 1), (3, 9), (65, 70)):
        assert torch.equal(gemm(x[begin:end], weight), together[begin:end])


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 150)])
def test_a_query_in_chunks(dtype, window, device):
    """In one chunk, in chunks that begin within pages, and alone."""
    length, dim, kv_heads = 330, 128, 2
    blocks = -(-length // PAGE) + 1
    k, v = (draw(blocks, kv_heads, PAGE, dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    tables = torch.arange(1, blocks, dtype=torch.int32, device=device)[None]
    q = draw(length, 8, dim, dtype=dtype, device=device, seed=4)
    options = {"scale": dim**-0.5, "window": window, "alike": True}

    def run(start: int, count: int) -> torch.Tensor:
        chunks = list_tiles([start], [count], [0], device)
        return prefill_attention(q[start : start + count].contiguous(), k, v, tables, chunks, **options)

    whole = run(0, length)
    for start, count in ((0, 70), (70, 130), (200, 130), (64, 200), (129, 1), (0, 1), (329, 1)):
        assert torch.equal(run(start, count), whole[start : start + count]), (start, count)
