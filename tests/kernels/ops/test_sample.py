"""The draw: who is a candidate, who is drawn, how often, and that company does not matter."""

import os

import pytest
import torch

from slotline.kernels import sample as sample_module
from slotline.kernels.argmax import argmax
from slotline.kernels.drop_rest import drop_rest
from slotline.kernels.logsumexp import logsumexp
from slotline.kernels.reference import drop_rest as drop_reference
from slotline.kernels.reference import philox as philox_reference
from slotline.kernels.reference import sample as sample_reference
from slotline.kernels.reference.sample import ranked, weights
from slotline.kernels.sample import sample
from slotline.kernels.top_logprobs import top_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
INF = float("inf")
CLOSE = 3e-6  # of a row's whole weight: exponentials differ in their last bits between devices


@pytest.fixture
def small_pools(monkeypatch):
    """Let fewer candidates be too many: the interpreter takes seconds to sort thousands, and every way is taken."""
    if INTERPRETED:
        monkeypatch.setattr(sample_module, "SHORT", 64)
        monkeypatch.setattr(sample_module, "POOL", 256)


def candidates(x, rows, result, drop):
    scores = x.clone()
    drop(scores, torch.arange(len(x), dtype=torch.int32, device=x.device), rows[0], result.cut_keys, result.cut_ids)
    return scores


def check(x, rows):
    """Hold an outcome against the reference's: equal, or next to a limit that rounding decides."""
    ours, expected = sample(x, *rows), sample_reference.sample(x, *rows)
    assert torch.equal(ours.status, expected.status)
    scores = candidates(x, rows, ours, drop_rest)
    kept = candidates(x, rows, ours, drop_reference.drop_rest)
    assert torch.equal(scores.nan_to_num(nan=9.0), kept.nan_to_num(nan=9.0))
    wanted = candidates(x, rows, expected, drop_reference.drop_rest)
    drawn = philox_reference.philox_uniform(rows[4], rows[5])
    for i in range(len(x)):
        if rows[0][i] == 0 or ours.status[i] != 0:
            assert ours.tokens[i] == expected.tokens[i]
            continue
        if not torch.equal(scores[i], wanted[i]):
            check_edge(x[i] / rows[0][i], scores[i], wanted[i], float(rows[3][i]))
        check_draw(scores[i], int(ours.tokens[i]), float(drawn[i]))


def check_edge(scores, ours, wanted, top_p):
    """Two cuts may differ where the weight in front of what one has and the other has not is all but at the limit."""
    order = ranked(scores)
    sizes = [int(kept.isfinite().sum()) for kept in (ours, wanted)]
    assert ours[order].isfinite().int().argmin() in (0, sizes[0]), "not the best ones"
    assert top_p < 1.0
    share = weights(scores)[order].double()
    reached = share.cumsum(0) - share
    low, high = sorted(sizes)
    assert (reached[high - 1] - reached[low]).abs() <= CLOSE * share.sum()


def check_draw(scores, token, drawn):
    assert scores[token].isfinite()
    share = weights(scores).double()
    high = float(share[: token + 1].sum() / share.sum())
    low = float(share[:token].sum() / share.sum())
    assert low - CLOSE <= drawn <= high + CLOSE


def test_sample(cut_case, all_cuts, make_logits, make_rows, small_pools):
    size = {name: cut_case.pop(name) for name in ("vocab", "kind", "rows")}
    if INTERPRETED and size["vocab"] > 32:
        size["rows"] = 1 if size["vocab"] > 100_000 else min(size["rows"], 2)
    check(make_logits(**size), make_rows(size["rows"], **(cut_case or all_cuts(size["rows"]))))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 0.9), (1.0, 700, 0.5), (3.0, 0, 0.97)])
def test_sample_at_full_size(temperature, top_k, top_p, make_logits, make_rows):
    check(make_logits(49_152, seed=4), make_rows(1, temperature=temperature, top_k=top_k, top_p=top_p))


def test_rows_mix(make_logits, make_rows, small_pools):
    """Rows of all ways through the kernels, in one call."""
    rows = 9
    x = make_logits(4500, rows=rows)
    x[6], x[7, 5], x[8] = -INF, torch.nan, 2.0
    cuts = {
        "temperature": [0.0, 1.0, 1.0, 0.8, 1.0, 2.0, 1.0, 1.0, 1.0],
        "top_k": [5, 0, 5, 0, 2000, 0, 0, 3, 1000],
        "top_p": [0.1, 1.0, 1.0, 0.9, 0.9, 0.99, 0.9, 1.0, 0.5],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0],
    }
    check(x, make_rows(rows, **cuts))
    assert sample(x, *make_rows(rows, **cuts)).status.tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 0]


def test_company_does_not_matter(make_logits, make_rows, device, small_pools):
    """Every result of a row is the same, bit by bit, alone and at any place among others."""
    rows, vocab = (4, 4500) if INTERPRETED else (257, 151_936)
    x = make_logits(vocab, rows=rows)
    temperature = [(0.7, 1.0, 0.0, 1.3)[i % 4] for i in range(rows)]
    top_k, top_p = [(50, 0, 0, 900)[i % 4] for i in range(rows)], [(0.9, 1.0, 1.0, 0.8)[i % 4] for i in range(rows)]
    params = make_rows(rows, temperature=temperature, top_k=top_k, top_p=top_p)
    which = torch.arange(rows, dtype=torch.int32, device=device)

    def outcome(part, columns, count):
        lines = torch.arange(count, dtype=torch.int32, device=device)
        table = top_logprobs(part, lines, lines, lines * 0 + 20, 20)
        return [*sample(part, *columns), *logsumexp(part), *argmax(part), table.own, table.ids, table.values]

    whole = outcome(x, params, rows)
    for i in {0, 1, rows // 2, rows - 1}:
        alone = outcome(x[i : i + 1], [column[i : i + 1] for column in params], 1)
        turned = torch.roll(which.long(), i)
        moved = outcome(x[turned], [column[turned] for column in params], rows)
        for name, (one, all_, other) in enumerate(zip(alone, whole, moved, strict=True)):
            if name != 9:  # the given token of an entry goes by its place
                assert torch.equal(one[0], all_[i]) or one[0].isnan().all()
                assert torch.equal(other, all_[turned]) or other.isnan().any()


def chi_squared(tokens, share):
    """Return the statistic over tokens that are expected five times or more, the rest taken together, and its bound."""
    expected = share * len(tokens)
    counts = torch.bincount(tokens.long().cpu(), minlength=len(share)).double()
    often = expected >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    full = expected > 0
    assert (counts[~full] == 0).all()
    freedom = max(1, int(full.sum()) - 1)
    return float(((counts - expected)[full] ** 2 / expected[full]).sum()), freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "seeded"),
    [
        (0, 1.0, 0.0, "by seed"),
        (6, 1.0, 0.0, "by position"),
        (0, 0.8, 0.0, "by seed"),
        (12, 0.7, 0.05, "by position"),
        (0, 1.0, 0.1, "by seed"),
        (0, 1.0, 0.0, "by position"),
    ],
)
def test_draws_follow_the_distribution(top_k, top_p, min_p, seeded, make_logits, make_rows):
    vocab, draws = (32, 120) if INTERPRETED else (4500, 60_000)
    x = make_logits(vocab, rows=1, seed=9) / 2
    numbers = {"seed": range(draws), "position": [17] * draws}
    if seeded == "by position":
        numbers = {"seed": [17] * draws, "position": range(draws)}
    cut = {"temperature": 0.9, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    one = make_rows(1, **cut)
    scores = x.clone()
    result = sample_reference.sample(x, *one)
    drop_reference.drop_rest(scores, torch.zeros(1, dtype=torch.int32), one[0], result.cut_keys, result.cut_ids)
    share = torch.softmax(scores[0].double().cpu(), -1)
    rows = make_rows(draws, **cut, **numbers)
    got, bound = chi_squared(sample(x.expand(draws, -1), *rows).tokens, share)
    assert got < bound
