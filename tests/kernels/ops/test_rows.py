"""Uniform numbers, the best of a row, log-sum-exp, and the table of logprobs, against their references."""

import os

import numpy as np
import pytest
import torch

from slotline.kernels.argmax import argmax
from slotline.kernels.logsumexp import logsumexp
from slotline.kernels.philox import philox_uniform
from slotline.kernels.reference import argmax as argmax_reference
from slotline.kernels.reference import logsumexp as logsumexp_reference
from slotline.kernels.reference import philox as philox_reference
from slotline.kernels.reference import top_logprobs as top_reference
from slotline.kernels.top_logprobs import top_logprobs
from slotline.plugins.torch_backend.philox import uniforms

pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu
INF = float("inf")


def test_uniform_numbers_are_those_of_the_torch_backend(device):
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate([edges, rng.integers(0, 2**64 - 1, 1500, np.uint64)])
    positions = np.concatenate([[0, 2**32 - 1, 2**32, 2**62], rng.integers(0, 2**40, 1500)])
    ours = philox_uniform(torch.from_numpy(seeds.view(np.int64)).to(device), torch.from_numpy(positions).to(device))
    assert ours.cpu().numpy().tolist() == uniforms(seeds, positions).tolist()
    expected = philox_reference.philox_uniform(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert torch.equal(ours.cpu(), expected)


def test_argmax(row_case, make_logits):
    x = make_logits(**row_case)
    ours, expected = argmax(x), argmax_reference.argmax(x)
    assert torch.equal(ours.tokens, expected.tokens) and torch.equal(ours.status, expected.status)


def test_logsumexp(row_case, make_logits):
    x = make_logits(**row_case)
    ours, expected = logsumexp(x), logsumexp_reference.logsumexp(x)
    assert torch.equal(ours.peaks, expected.peaks) and torch.equal(ours.status, expected.status)
    torch.testing.assert_close(ours.logs, expected.logs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours.values.double(), torch.logsumexp(x.double(), -1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [32, 49_152])
def test_status(vocab, make_logits, device):
    x = make_logits(vocab, rows=5)
    x[0] = -INF
    x[1, -1], x[2, 0], x[3, 7] = torch.nan, INF, -INF
    assert argmax(x).status.tolist() == logsumexp(x).status.tolist() == [1, 2, 2, 0, 0]
    assert argmax(x).tokens[:3].tolist() == [0, 0, 0]
    assert logsumexp(x).logs.isnan().tolist() == [True, True, True, False, False]
    five = torch.arange(5, dtype=torch.int32, device=device)
    table = top_logprobs(x, five, five, five * 0 + 2, 2)
    assert table.status.tolist() == [1, 2, 2, 0, 0] and table.counts.tolist() == [0, 0, 0, 2, 2]
    assert table.own[:3].tolist() == [-INF] * 3 and (table.ids[:3] == -1).all() and (table.values[:3] == -INF).all()


def test_signed_zeros_tie(device):
    x = torch.full((1, 32), -1.0, device=device)
    x[0, 4], x[0, 9] = -0.0, 0.0
    assert argmax(x).tokens.tolist() == [4]
    none = torch.zeros(1, dtype=torch.int32, device=device)
    table = top_logprobs(x, none, none + 9, none + 2, 2)
    assert table.ids.tolist() == [[4, 9]] and table.ranks.tolist() == [2]


def entries(rows: int, vocab: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return entries for a shuffle of the rows, one for no row, narrow ones, one wider than the table."""
    rng = torch.Generator().manual_seed(rows + width)
    which = torch.cat([torch.randperm(rows, generator=rng), torch.tensor([-1])]).int()
    given = torch.randint(vocab, (rows + 1,), generator=rng).int()
    widths = torch.full((rows + 1,), width, dtype=torch.int32)
    widths[1::3], widths[2::3] = width // 2, width + 7
    return which.to(device), given.to(device), widths.to(device)


def check_table(x, which, given, widths, columns):
    ours = top_logprobs(x, which, given, widths, columns)
    expected = top_reference.top_logprobs(x, which, given, widths, columns)
    there = which >= 0
    for name in ("ranks", "ids", "counts", "status"):
        assert torch.equal(getattr(ours, name)[there], getattr(expected, name)[there]), name
    for name in ("own", "values"):
        torch.testing.assert_close(getattr(ours, name)[there], getattr(expected, name)[there], rtol=2e-6, atol=2e-6)
        assert not getattr(ours, name)[there].isnan().any() and (getattr(ours, name)[there] <= 0).all()


def test_top_logprobs(top_case, make_logits, device):
    width = top_case.pop("width")
    slow = width == 1024 or top_case["kind"] == "flat"  # the interpreter takes seconds to sort, or walk over, a row
    if device.type == "cpu" and slow and top_case["vocab"] > 32:
        top_case["rows"] = 1
    x = make_logits(**top_case)
    check_table(x, *entries(*x.shape, width, device), width)


def test_own_value_does_not_depend_on_the_width(make_logits, device):
    x = make_logits(49_152, rows=2)
    which, given = torch.tensor([0, 1], device=device).int(), torch.tensor([77, 3], device=device).int()
    tables = [top_logprobs(x, which, given, torch.full_like(which, n), n) for n in (0, 3, 50)]
    for table in tables[1:]:
        assert torch.equal(table.own, tables[0].own) and torch.equal(table.ranks, tables[0].ranks)


def test_a_table_has_a_limit(make_logits, device):
    one = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="1025 columns are not between 0 and 1024"):
        top_logprobs(make_logits(32), one, one, one, 1025)


def test_tensors_of_another_kind_are_refused(make_logits, device):
    x = make_logits(32, rows=2)
    with pytest.raises(ValueError, match="logits must be float32 rows"):
        argmax(x.half())
    with pytest.raises(ValueError, match="logits must be float32 rows"):
        argmax(x.T)
    with pytest.raises(ValueError, match="seeds must be contiguous"):
        philox_uniform(torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device))


def test_rows_of_a_wider_matrix(make_logits, device):
    """Padding columns behind the vocabulary, as of a padded LM head, are not looked at."""
    wide = make_logits(4200, rows=3)
    wide[:, 4100:] = torch.nan
    x = wide[:, :4100]
    assert torch.equal(argmax(x).tokens, argmax_reference.argmax(x).tokens)
    three = torch.arange(3, dtype=torch.int32, device=device)
    check_table(x, three, three, three * 0 + 5, 5)
