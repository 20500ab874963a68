"""Norms, activations, rotation with the KV write, and both attentions, against their references."""

import dataclasses
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.kernels import paged_attention as paged_attention_module
from slotline.kernels.gate import ACTIVATIONS, gate
from slotline.kernels.paged_attention import SPLIT, Cut, cut_for, list_splits, paged_attention
from slotline.kernels.prefill_attention import TILE, list_tiles, prefill_attention
from slotline.kernels.reference import gate as gate_reference
from slotline.kernels.reference import paged_attention as paged_reference
from slotline.kernels.reference import prefill_attention as prefill_reference
from slotline.kernels.reference import rms_norm as norm_reference
from slotline.kernels.reference import rotate_and_store as rotate_reference
from slotline.kernels.rms_norm import rms_norm
from slotline.kernels.rotate_and_store import HeadNorms, rotate_and_store

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE = 64
# (query heads, kv heads, head size): grouped, multi-head, multi-query; every size that models have
HEADS = [(4, 2, 64), (3, 3, 80), (4, 1, 96), (2, 1, 128), (2, 2, 256)]
if not INTERPRETED:
    HEADS += [(32, 8, 128), (16, 8, 128), (16, 1, 64)]
# Interpreted, a second dtype is tried with one shape only.
SHAPES = [(heads, dtype) for heads in HEADS for dtype in DTYPES[: 1 if INTERPRETED and heads != HEADS[3] else None]]


def near(ours: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    bound = CLOSE[expected.dtype] * scale
    torch.testing.assert_close(ours.float(), expected.float(), rtol=bound, atol=bound)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=rng).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 2304])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(dtype, width, add, device):
    x = draw(5, 2 * width, dtype=dtype, device=device)[:, :width]  # strided rows
    weight = 1 + 0.1 * draw(width, dtype=dtype, device=device)
    residuals = [draw(5, width, dtype=dtype, device=device, seed=1) if add else None for _ in range(2)]
    near(rms_norm(x, weight, 1e-5, residuals[0]), norm_reference.rms_norm(x, weight, 1e-5, residuals[1]))
    if add:
        assert torch.equal(*residuals), "the residual is the rounded sum"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm_of_parts(dtype, parts, add, device):
    """They are added up, and the sum is rounded, before anything else."""
    x = draw(parts, 5, 576, dtype=torch.float32, device=device)
    weight = 1 + 0.1 * draw(576, dtype=dtype, device=device)
    residuals = [draw(5, 576, dtype=dtype, device=device, seed=1) if add else None for _ in range(2)]
    whole = x.sum(0).to(dtype)
    near(rms_norm(x, weight, 1e-5, residuals[0]), norm_reference.rms_norm(x, weight, 1e-5, residuals[1]))
    near(rms_norm(x, weight, 1e-5), rms_norm(whole, weight, 1e-5))
    if add:
        near(*residuals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("half", [96, 1536])
def test_gate(dtype, activation, half, device):
    both = draw(3, 2 * half, dtype=dtype, device=device)
    near(gate(both, activation), gate_reference.gate(both, activation))


def test_gate_refuses_an_unknown_activation(device):
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: silu, gelu"):
        gate(draw(1, 4, dtype=torch.float32, device=device), "relu")


def angles(length: int, dim: int, device: torch.device) -> torch.Tensor:
    turn = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([turn.cos(), turn.sin()], -1).float().to(device)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize(("normed", "tokens"), [(False, 7), (True, 7), (False, 21), (True, 21)])
def test_rotate_and_store(dtype, shape, normed, tokens, device):
    """A few tokens, and as many as make programs take several of them."""
    heads, kv_heads, dim = shape
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 1, 5, 63, 64, 200, 17] * 3, dtype=torch.int32, device=device)[:tokens]
    places = torch.tensor([64, 65, 191, 192, 100, 3, 255], dtype=torch.int32, device=device)
    places = torch.cat([places, torch.arange(66, 80, dtype=torch.int32, device=device)])[:tokens]
    norms = None
    if normed:
        norms = HeadNorms(*(1 + 0.1 * draw(dim, dtype=dtype, device=device, seed=s) for s in (3, 4)), 1e-6)
    outcomes = []
    for op in (rotate_and_store, rotate_reference.rotate_and_store):
        pages = [torch.zeros(4, kv_heads, PAGE, dim, dtype=dtype, device=device) for _ in range(2)]
        q = op(qkv, angles(256, dim, device), positions, places, *pages, norms)
        kept = qkv.clone()
        assert torch.equal(op(kept, angles(256, dim, device), positions, places, *pages, norms, keep=True), q)
        outcomes.append((q, *pages, kept))
    for ours, expected in zip(*outcomes, strict=True):
        near(ours, expected)
    assert outcomes[0][1].abs().sum(-1).count_nonzero() == tokens * kv_heads, "other places were written"


def pages_for(lengths, kv_heads, dim, dtype, device, spare=3):
    """Return k and v pages whose unused places are NaN, and tables of shuffled blocks."""
    per_row = [-(-n // PAGE) for n in lengths]
    blocks = 1 + torch.randperm(sum(per_row) + spare, generator=torch.Generator().manual_seed(5))
    tables = torch.zeros(len(lengths) + 1, max([*per_row, 1]), dtype=torch.int32)
    at = 0
    k, v = (draw(len(blocks) + 1, kv_heads, PAGE, dim, dtype=dtype, device="cpu", seed=s) for s in (1, 2))
    for row, (n, count) in enumerate(zip(lengths, per_row, strict=True)):
        tables[row, :count] = blocks[at : at + count]
        at += count
        if n % PAGE:
            k[tables[row, count - 1], :, n % PAGE :] = float("nan")
            v[tables[row, count - 1], :, n % PAGE :] = float("nan")
    return k.to(device), v.to(device), tables.to(device)


LENGTHS = [1, 63, 64, 65, 200, SPLIT, SPLIT + 1, 0, 2 * SPLIT + 77]
CUTS = [  # window, soft cap, how rows are cut, whether the work list names the table rows
    (0, 0.0, Cut(), False),
    (100, 0.0, Cut(128), True),
    (0, 0.0, Cut(64, most=5), True),
    (SPLIT + 5, 20.0, Cut(most=8), False),
    (600, 0.0, Cut(64, most=3), True),
    (0, 0.0, Cut(64, most=16, spread=12), True),
    (300, 0.0, Cut(128, spread=7), False),
]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize(("window", "soft_cap", "cut", "listed"), CUTS)
def test_paged_attention(shape, dtype, window, soft_cap, cut, listed, device):
    heads, kv_heads, dim = shape
    k, v, tables = pages_for(LENGTHS, kv_heads, dim, dtype, device)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)[order].to(device)
    rows = order.int().to(device)
    q = draw(len(LENGTHS), heads, dim, dtype=dtype, device=device, seed=9)
    how = (lengths, cut.capacity(len(LENGTHS), max(LENGTHS)), window, cut, rows if listed else None)
    work, expected_work = list_splits(*how), paged_reference.list_splits(*how)
    assert torch.equal(work.total, expected_work.total)
    total = int(work.total[0])
    assert (work.items[1:total, 2] <= work.items[: total - 1, 2]).all(), "the longest rows come first"
    assert torch.equal(work.items[:total], expected_work.items[:total])
    options = {"scale": dim**-0.5, "window": window, "soft_cap": soft_cap}
    ours = paged_attention(q, k, v, tables, rows, lengths, work, **options)
    expected = paged_reference.paged_attention(q, k, v, tables, rows, lengths, work, **options)
    real = lengths > 0
    near(ours[real], expected[real])
    assert ours[real].isfinite().all()
    assert not work.arrived.any(), "the counters are ready for the next launch"
    assert torch.equal(paged_attention(q, k, v, tables, rows, lengths, work, **options)[real], ours[real])


def test_more_items_than_programs(device, monkeypatch):
    """A program goes on to further items, those of one row among them."""
    monkeypatch.setattr(paged_attention_module, "PROGRAMS", 1)
    lengths = torch.tensor([2000, 0, 130, 1], dtype=torch.int32, device=device)
    k, v, tables = pages_for(lengths.tolist(), 2, 64, torch.float16, device)
    q = draw(4, 4, 64, dtype=torch.float16, device=device)
    rows = torch.arange(4, dtype=torch.int32, device=device)
    work = list_splits(lengths, 64, cut=Cut(64))
    assert work.total.tolist() == [36, 64]
    ours = paged_attention(q, k, v, tables, rows, lengths, work, scale=0.125)
    expected = paged_reference.paged_attention(q, k, v, tables, rows, lengths, work, scale=0.125)
    near(ours[[0, 2, 3]], expected[[0, 2, 3]])
    into = torch.full_like(q, 7.0)
    assert paged_attention(q, k, v, tables, rows, lengths, work, scale=0.125, out=into) is into
    assert torch.equal(into[[0, 2, 3]], ours[[0, 2, 3]])
    assert (into[1] == 7).all(), "a row without keys is left as it is"


def test_how_rows_are_cut():
    """Splits are whole pages, and a longer batch never cuts finer."""
    cuts = [cut_for(rows, 8) for rows in (1, 2, 4, 8, 16, 32, 64, 256, 4096)]
    assert all(cut.split % PAGE == 0 and cut.most > 0 for cut in cuts)
    assert cuts == sorted(cuts, key=lambda cut: cut.split)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=60), st.integers(0, 900), st.integers(0, 20), st.integers(0, 50)
)
def test_no_batch_has_more_splits_than_it_has_room_for(lengths, window, most, spread):
    cut = Cut(64, most, spread)
    work = paged_reference.list_splits(torch.tensor(lengths, dtype=torch.int32), 60 * 50, window, cut)
    assert work.total[0] <= cut.capacity(len(lengths), 3000)


@pytest.mark.parametrize("most", [0, 4])
def test_a_row_comes_out_the_same_in_any_batch(most, device):
    """Bitwise: alone, among others, and wherever it stands."""
    lengths = [2 * SPLIT + 77, 5, 300, 64]
    k, v, tables = pages_for(lengths, 2, 64, torch.float32, device)
    q = draw(len(lengths), 4, 64, dtype=torch.float32, device=device)

    def run(rows):
        counts = torch.tensor([lengths[r] for r in rows], dtype=torch.int32, device=device)
        picked = torch.tensor(rows, dtype=torch.int32, device=device)
        work = list_splits(counts, 40, cut=Cut(128, most))
        return paged_attention(q[picked.long()], k, v, tables, picked, counts, work, scale=0.125)

    together = run([0, 1, 2, 3])
    for row in range(4):
        assert torch.equal(run([row])[0], together[row])
    assert torch.equal(run([3, 2, 1, 0]).flip(0), together)


CHUNKS = [  # (start, count) of each chunk in a step
    [(0, 1), (0, TILE), (0, TILE + 1)],
    [(64, 30), (0, 70), (131, 3)],
    [(200, 70), (320, 5), (0, 300)],
]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize(
    ("chunks", "window", "soft_cap"),
    [(CHUNKS[0], 0, 0.0), (CHUNKS[1], 0, 0.0), (CHUNKS[1], 50, 20.0), (CHUNKS[2], 50, 0.0)],
    ids=["whole", "prefixed", "prefixed-window-cap", "long-window"],
)
def test_prefill_attention(dtype, shape, window, soft_cap, chunks, device):
    heads, kv_heads, dim = shape
    lengths = [start + count for start, count in chunks]
    k, v, tables = pages_for(lengths, kv_heads, dim, dtype, device)
    rows = list(range(len(chunks)))[::-1]  # tables of other rows than the chunks' own numbers
    tables = tables[[*rows, len(chunks)]].contiguous()
    tiles = list_tiles([s for s, _ in chunks], [n for _, n in chunks], rows, device)
    q = draw(sum(n for _, n in chunks), heads, dim, dtype=dtype, device=device, seed=4)
    options = {"scale": dim**-0.5, "window": window, "soft_cap": soft_cap}
    ours = prefill_attention(q, k, v, tables, tiles, **options)
    expected = prefill_reference.prefill_attention(q, k, v, tables, tiles, **options)
    near(ours, expected, 2)
    assert ours.isfinite().all()
    none = torch.full((3,), -1, dtype=torch.int32, device=device)
    more = {name: torch.cat([getattr(tiles, name), none]) for name in ("tile_chunks", "tile_numbers")}
    into = torch.empty_like(q)
    prefill_attention(q, k, v, tables, dataclasses.replace(tiles, **more), **options, out=into)
    assert torch.equal(into, ours), "a tile of no chunk does nothing"
    near(prefill_attention(q, k, v, tables, tiles, **options, alike=True), expected, 2)
