"""Products of one row, alone and behind a norm, and of a few rows, against their references."""

import os

import pytest
import torch

from slotline.kernels.gemv import gemv
from slotline.kernels.norm_gemv import norm_gemv
from slotline.kernels.norm_gemv import pays as norm_gemv_pays
from slotline.kernels.reference import gemv as gemv_reference
from slotline.kernels.reference import norm_gemv as norm_gemv_reference
from slotline.kernels.reference import skinny_gemm as skinny_reference
from slotline.kernels.reference import tiled_gemm as tiled_reference
from slotline.kernels.skinny_gemm import MOST, skinny_gemm
from slotline.kernels.skinny_gemm import pays as skinny_gemm_pays
from slotline.kernels.tiled_gemm import Tile, tiled_gemm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = [(96, 64), (30, 576), (50, 1536), (7, 4096), (3, 5120)]
if not INTERPRETED:
    SIZES += [(6144, 4096), (4096, 14336), (151936, 1024), (1024, 3072)]
GATES = [None, "silu", "gelu"]


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=rng).to(dtype).to(device)


def near(ours: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    torch.testing.assert_close(ours.float(), expected.float(), rtol=bound, atol=bound)


def weights(rows, columns, gated, biased, dtype, device):
    count = 2 * rows if gated else rows
    bias = draw(count, dtype=dtype, device=device, seed=2) if biased else None
    return draw(count, columns, dtype=dtype, device=device, seed=1) * columns**-0.5, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("biased", [False, True])
def test_gemv(dtype, rows, columns, activation, biased, device):
    x = draw(1, columns, dtype=dtype, device=device)
    weight, bias = weights(rows, columns, activation is not None, biased, dtype, device)
    for options in ({}, {"out_dtype": torch.float32}, {"dependent": True}):
        ours = gemv(x, weight, bias, activation=activation, **options)
        near(ours, gemv_reference.gemv(x, weight, bias, activation=activation, **options), CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_norm_gemv(dtype, rows, columns, activation, biased, add, device):
    x = draw(1, columns, dtype=dtype, device=device)
    residual = draw(1, columns, dtype=dtype, device=device, seed=5) if add else None
    gain = 1 + 0.1 * draw(columns, dtype=dtype, device=device, seed=6)
    weight, bias = weights(rows, columns, activation is not None, biased, dtype, device)
    before = None if residual is None else residual.clone()
    entry = {"residual": residual, "activation": activation}
    ours, summed = norm_gemv(x, gain, 1e-5, weight, bias, **entry)
    expected, wanted = norm_gemv_reference.norm_gemv(x, gain, 1e-5, weight, bias, **entry)
    near(ours, expected, CLOSE[dtype])
    assert torch.equal(summed, wanted), "the residual is the rounded sum"
    assert residual is None or torch.equal(residual, before), "other programs may still read it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (30, 576), (50, 1536), (7, 4096), *SIZES[5:]])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("count", "biased"), [(1, True), (3, False), (8, True), (MOST, False)])
def test_skinny_gemm(dtype, rows, columns, activation, count, biased, device):
    x = draw(count, columns, dtype=dtype, device=device)
    weight, bias = weights(rows, columns, activation is not None, biased, dtype, device)
    for options in ({}, {"out_dtype": torch.float32}, {"dependent": True}):
        ours = skinny_gemm(x, weight, bias, activation=activation, **options)
        near(ours, skinny_reference.skinny_gemm(x, weight, bias, activation=activation, **options), CLOSE[dtype])
    if activation is None:
        assert torch.equal(skinny_gemm(x[:1], weight, bias), skinny_gemm(x, weight, bias)[:1]) or count > 8


# More stages, more warps and wider tiles only differ where they are compiled.
TILES = [Tile(32, 64, 64, 4, 3), Tile(64, 64, 128, 4, 3)]
if not INTERPRETED:
    TILES += [Tile(32, 64, 128, 4, 5), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 3)]


def skip_without_fetching(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("the device fetches no tiles")


def halves(dtype: torch.dtype) -> bool:
    return dtype != torch.float32


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if INTERPRETED or halves(dtype)])
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (30, 200), *([] if INTERPRETED else [(6144, 4096)])])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("count", "biased"), [(2, True), (70, False)])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiled_gemm(dtype, rows, columns, activation, count, biased, tile, device):
    """Rows, weights and columns that fill no whole number of tiles among them."""
    skip_without_fetching(device)
    x = draw(count, columns, dtype=dtype, device=device)
    weight, bias = weights(rows, columns, activation is not None, biased, dtype, device)
    for options in ({}, {"out_dtype": torch.float32}):
        ours = tiled_gemm(x, weight, bias, tile=tile, activation=activation, **options)
        expected = tiled_reference.tiled_gemm(x, weight, bias, tile=tile, activation=activation, **options)
        near(ours, expected, CLOSE[dtype])
    assert torch.equal(tiled_gemm(x[:1], weight, bias, tile=tile), tiled_gemm(x, weight, bias, tile=tile)[:1])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if INTERPRETED or halves(dtype)])
@pytest.mark.parametrize("columns", [64, 200, 520])
@pytest.mark.parametrize(("parts", "biased"), [(2, True), (4, False)])
def test_products_in_parts(dtype, columns, parts, biased, device):
    """Of 64 columns, some parts have none."""
    skip_without_fetching(device)
    tile = Tile(32, 64, 64, 4, 3, parts)
    x = draw(40, columns, dtype=dtype, device=device)
    weight, bias = weights(96, columns, False, biased, dtype, device)
    ours = tiled_gemm(x, weight, bias, tile=tile)
    assert ours.shape == (parts, 40, 96)
    near(ours, tiled_reference.tiled_gemm(x, weight, bias, tile=tile), CLOSE[dtype])
    near(ours.sum(0).to(dtype), tiled_reference.tiled_gemm(x, weight, bias, tile=Tile(1, 1, 1, 1, 1)), CLOSE[dtype])
    with pytest.raises(ValueError, match="only what is added up may come in parts"):
        tiled_gemm(x, weight, tile=tile, activation="silu")


@pytest.mark.parametrize("parts", [1, 4])
def test_tiles_are_written_and_read(parts):
    tile = Tile(64, 128, 32, 8, 5, parts)
    assert Tile.parse(str(tile)) == tile
    with pytest.raises(ValueError, match="'tile 1x2' is no tile"):
        Tile.parse("tile 1x2")


def test_rows_that_cannot_be_fetched_are_refused(device):
    x = draw(2, 30, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"30 columns of torch\.float16 are no multiple of 16 bytes"):
        tiled_gemm(x, x, tile=TILES[0])


def test_what_pays():
    """Where the library's product is faster, or where nobody looked, the answer is no."""
    assert skinny_gemm_pays(8, 6144, 4096) and skinny_gemm_pays(2, 92544, 4096) and skinny_gemm_pays(16, 1024, 3072)
    assert skinny_gemm_pays(8, 14336, 4096, gated=True) and not skinny_gemm_pays(8, 3072, 1024, gated=True)
    assert not skinny_gemm_pays(8, 28672, 4096) and not skinny_gemm_pays(17, 6144, 4096)
    assert not skinny_gemm_pays(8, 6144, 4096, size=4) and not skinny_gemm_pays(1, 6144, 4096)
    assert norm_gemv_pays(1024) and not norm_gemv_pays(4096)


def test_too_many_rows_are_refused(device):
    x = draw(MOST + 1, 16, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="17 rows are more than 16"):
        skinny_gemm(x, x)


def test_an_unknown_activation_is_refused(device):
    x, weight = (draw(2, 16, dtype=torch.float32, device=device) for _ in range(2))
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: silu, gelu"):
        gemv(x[:1], weight, activation="relu")
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: silu, gelu"):
        norm_gemv(x[:1], weight[0], 1e-5, weight, activation="relu")
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: silu, gelu"):
        skinny_gemm(x, weight, activation="relu")
