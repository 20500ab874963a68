"""What narrows a row down: a bound that n of the groups' largest reach, and the tokens of the groups that reach it."""

import os

import pytest
import torch
import triton
import triton.language as tl

from slotline.kernels.ordering import value_of
from slotline.kernels.selection import gather_groups, keys_of_groups, reached_by

pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu
INF = float("inf")


@triton.jit
def bound_kernel(tops, count, n, out, WIDTH: tl.constexpr):
    keys = keys_of_groups(tops, count, tl.full([], 1.0, tl.float32), WIDTH)
    tl.store(out, value_of(reached_by(keys, n)))


@triton.jit
def gather_kernel(row, vocab, tops, least, listed, pool, out, WIDTH: tl.constexpr, POOL: tl.constexpr):
    one = tl.full([], 1.0, tl.float32)
    keys = keys_of_groups(tops, (vocab + 31) // 32, one, WIDTH)
    bound = tl.load(least).to(tl.uint32)
    tl.store(out, gather_groups(row, vocab, one, keys, bound, listed, pool, 32, 64, POOL))


def bound(tops: torch.Tensor, n: int) -> float:
    out = torch.zeros(1, device=tops.device)
    bound_kernel[(1,)](tops, len(tops), n, out, WIDTH=1 << (len(tops) - 1).bit_length(), num_warps=4)
    return float(out)


@pytest.mark.parametrize("n", [1, 5, 50, 700, 1000])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e6])
def test_a_bound_is_reached_by_enough_and_hardly_more(n, spread, device):
    tops = (torch.randn(1000, generator=torch.Generator().manual_seed(n)) * spread).to(device)
    reach = int((tops >= bound(tops, n)).sum())
    assert n <= reach <= n + n // 16 + 4


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 301), (300, 301), (302, 400)])
def test_equal_ones_reach_it_together(n, expected, device):
    tops = torch.full((400,), 3.0, device=device)
    tops[7], tops[301:] = 9.0, -2.0
    assert int((tops >= bound(tops, n)).sum()) == expected


def test_groups_without_a_finite_logit_count_for_nothing(device):
    tops = torch.full((100,), -INF, device=device)
    tops[3], tops[50] = 1.0, -5.0
    assert bound(tops, 1) in (1.0, -5.0) and bound(tops, 2) == -5.0
    lowest = torch.finfo(torch.float32).min
    assert bound(tops, 3) == lowest  # all that are finite


@pytest.mark.parametrize("vocab", [64, 999, 4500])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_tokens_that_reach_a_bound_are_gathered(vocab, share, device):
    pool_size = 256
    rng = torch.Generator().manual_seed(vocab)
    row = torch.randperm(vocab, generator=rng).float() + 1  # all different, all positive
    groups = -(-vocab // 32)
    padded = torch.full((groups * 32,), -INF)
    padded[:vocab] = row
    tops = padded.view(groups, 32).amax(1)
    least = vocab - int(share * vocab)  # the best 1 + share
    key = torch.tensor([float(least)]).view(torch.int32).long() + (1 << 31)
    pool = torch.zeros(pool_size, dtype=torch.int64, device=device)
    listed, out = (torch.zeros(size, dtype=torch.int32, device=device) for size in (pool_size, 1))
    width = max(16, 1 << (groups - 1).bit_length())
    gather_kernel[(1,)](
        row.to(device),
        vocab,
        tops.to(device),
        key.to(device),
        listed,
        pool,
        out,
        WIDTH=width,
        POOL=pool_size,
        num_warps=4,
    )
    expected = (row >= least).nonzero()[:, 0]
    if len(expected) > pool_size:
        assert int(out) > pool_size
        return
    ids = (pool[: int(out)].cpu() & 0xFFFFFFFF) ^ 0xFFFFFFFF
    assert ids.tolist() == expected.tolist()  # in the order of their ids
