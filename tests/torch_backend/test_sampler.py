"""Sampling, stage by stage, against a slow and simple reading of the order in `sampler.py`."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st

from slotline.plugins.torch_backend import ranking
from slotline.plugins.torch_backend.philox import uniforms
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rows import Row
from slotline.plugins.torch_backend.sampler import Sampler

VOCAB = 40
DROPPED = -np.inf


def sample(logits, setups, positions=None, masks=None):
    rows = [Row(setup, logits.shape[-1], 16) for setup in setups]
    positions = np.array([row.length for row in rows] if positions is None else positions, np.int64)
    return Sampler(Processors({}, None)).sample(torch.tensor(logits, dtype=torch.float32), rows, positions, masks)


def reference_scores(logits, setup, position, mask=None):
    """Return the scores that the choice is made from."""
    p, x = setup.params, np.array(logits, np.float32)
    prompt, output = setup.token_ids[: setup.prompt_len].tolist(), setup.token_ids[setup.prompt_len :].tolist()
    known = prompt + output
    for i in range(len(x)):
        if (mask is not None and not mask[i]) or (p.allowed_token_ids is not None and i not in p.allowed_token_ids):
            x[i] = DROPPED
    for word in setup.bad_words:
        if tuple(known[len(known) - len(word) + 1 :]) == tuple(word[:-1]):
            x[word[-1]] = DROPPED
    if position < setup.min_len:
        x[list(setup.stop_ids)] = DROPPED
    for i, bias in (p.logit_bias or {}).items():
        x[i] += np.float32(bias)
    for i in set(known):
        r = np.float32(p.repetition_penalty)
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i in set(output):
        x[i] -= np.float32(p.frequency_penalty) * np.float32(output.count(i))
        x[i] -= np.float32(p.presence_penalty)
    if p.greedy or not np.isfinite(x).any():
        return x
    x /= np.float32(p.temperature)
    with np.errstate(divide="ignore"):
        x[x < x.max() + np.float32(np.log(p.min_p))] = DROPPED
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k > 0:
        x[ranked[p.top_k :]] = DROPPED
    mass = np.exp(x.astype(np.float64) - x.max())
    total, above = mass.sum(), 0.0
    for i in ranked:
        # Which side of the limit a sum falls on is a matter of rounding where it falls on the limit itself.
        if currently_in_test_context():
            assume(p.top_p == 1.0 or x[i] == DROPPED or abs(above - p.top_p * total) > 1e-6 * total)
        if p.top_p < 1.0 and above >= p.top_p * total:
            x[i] = DROPPED
        above += mass[i]
    return x


def check_choice(scores, setup, position, token, valid):
    if not np.isfinite(scores).any():
        assert not valid
        return
    assert valid
    if setup.params.greedy:
        assert token == int(np.argmax(scores))
        return
    mass = np.exp(scores.astype(np.float64) - scores.max())
    high = np.cumsum(mass / mass.sum())
    drawn = uniforms(np.array([setup.seed], np.uint64), np.array([position]))[0]
    assert mass[token] > 0
    assert high[token] - mass[token] / mass.sum() - 1e-6 <= drawn <= high[token] + 1e-6


tokens = st.integers(0, VOCAB - 1)
params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.7])},
    optional={
        "top_k": st.integers(-1, VOCAB + 5).filter(lambda k: k != 0),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.sampled_from([0.0, 0.013, 0.21, 1.0]),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(tokens, st.integers(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=20),
        "bad_words": st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "stop_ids": st.lists(tokens, max_size=5, unique=True).map(tuple),
        "min_tokens": st.integers(0, 3),
        "seed": st.integers(0, 2**64 - 1),
        "output": st.lists(st.integers(0, 5), max_size=12),
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    },
)
lines = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB)  # ties abound


@given(st.lists(st.tuples(lines, params), min_size=1, max_size=4))
def test_every_stage_in_order(setup_row, rows):
    setups = [setup_row(row=i, **options) for i, (_, options) in enumerate(rows)]
    logits = np.array([line for line, _ in rows], np.float32)
    sampled = sample(logits, setups)
    for i, setup in enumerate(setups):
        position = len(setup.token_ids)
        scores = reference_scores(logits[i], setup, position)
        got = sampled.scores[i].numpy()
        if np.isfinite(scores).any():
            assert np.array_equal(np.isfinite(scores), np.isfinite(got)), "another set of candidates is left"
            np.testing.assert_allclose(got, scores, rtol=1e-5, atol=1e-5)
        check_choice(scores, setup, position, int(sampled.tokens[i]), bool(sampled.valid[i]))


@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.floats(0.05, 0.999), st.sampled_from([1.0, 6.0, 200.0]))
@settings(max_examples=40)
def test_truncation_of_a_wide_vocabulary(setup_row, seed, top_k, top_p, spread):
    """Flat and peaked distributions wider than the candidates looked at first."""
    logits = np.random.default_rng(seed).normal(size=(3, 3000)).astype(np.float32) * np.float32(spread) / 10
    setups = [
        setup_row(temperature=1.0, top_p=top_p),
        setup_row(temperature=1.0, top_p=top_p, top_k=top_k, row=1),
        setup_row(temperature=1.0, top_k=top_k, row=2),
    ]
    sampled = sample(logits, setups)
    for i, setup in enumerate(setups):
        scores = reference_scores(logits[i], setup, 3)
        assert np.array_equal(np.isfinite(scores), np.isfinite(sampled.scores[i].numpy()))


@given(st.lists(params, min_size=2, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_company_changes_nothing(setup_row, options, seed):
    logits = np.random.default_rng(seed).normal(size=(len(options), VOCAB)).astype(np.float32)
    setups = [setup_row(row=i, **o) for i, o in enumerate(options)]
    together = sample(logits, setups)
    for i, setup in enumerate(setups):
        alone = sample(logits[i : i + 1], [setup])
        assert bool(alone.valid[0]) == bool(together.valid[i])
        if alone.valid[0]:
            assert alone.tokens[0] == together.tokens[i]
            assert torch.equal(alone.scores[0], together.scores[i])


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.6}])
def test_draws_have_the_right_frequencies(setup_row, options):
    """Chi-squared over 20,000 draws at as many positions."""
    draws, vocab = 20_000, 12
    line = np.random.default_rng(3).normal(size=vocab).astype(np.float32)
    setup = setup_row(**{"temperature": 1.0, "seed": 99, **options})
    row = Row(setup, vocab, 16)
    sampler = Sampler(Processors({}, None))
    logits = torch.from_numpy(line).repeat(draws, 1)
    tokens = sampler.sample(logits, [row] * draws, np.arange(draws)).tokens
    scores = reference_scores(line, setup, 3)
    expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() * draws
    counts = np.bincount(tokens, minlength=vocab)
    kept = expected > 0
    assert not counts[~kept].any()
    chi2 = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi2 < 40  # up to 11 degrees of freedom: one in 30,000


def test_greedy_ties_go_to_the_lowest_id(setup_row):
    logits = np.zeros((2, 500), np.float32)
    logits[1, [77, 300]] = 3
    assert sample(logits, [setup_row(temperature=0.0), setup_row(temperature=0.0, row=1)]).tokens.tolist() == [0, 77]


def test_top_k_one_is_the_lowest_of_equals(setup_row):
    logits = np.zeros((1, 500), np.float32)
    assert {sample(logits, [setup_row(top_k=1, seed=s)]).tokens.item() for s in range(20)} == {0}


def test_greedy_ignores_seed_and_truncation_but_not_masks(setup_row):
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    assert sample(logits, [setup_row(temperature=0, top_k=3, top_p=0.1, seed=9)]).tokens.item() == VOCAB - 1
    assert sample(logits, [setup_row(temperature=0, allowed_token_ids=[3, 5])]).tokens.item() == 5
    assert sample(logits, [setup_row(temperature=0, bad_words=((VOCAB - 1,),))]).tokens.item() == VOCAB - 2
    assert sample(logits, [setup_row(temperature=0, logit_bias={7: 100})]).tokens.item() == 7


def test_penalties_tell_prompt_from_output(setup_row):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 4], logits[0, 9] = 3.0, 2.0
    options = {"temperature": 0, "prompt": [4, 4, 4]}
    assert sample(logits, [setup_row(frequency_penalty=2, presence_penalty=2, **options)]).tokens.item() == 4
    assert sample(logits, [setup_row(repetition_penalty=2, **options)]).tokens.item() == 9
    assert sample(logits, [setup_row(frequency_penalty=0.6, output=[4, 4], **options)]).tokens.item() == 9


def test_a_stop_id_waits_for_min_tokens(setup_row):
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 2] = 9.0
    setup = setup_row(temperature=0, stop_ids=(2,), min_tokens=4)  # prompt of 3: position 7 is the first that may stop
    assert [sample(logits, [setup], [p]).tokens.item() for p in (3, 6, 7, 8)] == [0, 0, 2, 2]


@dataclass
class Masks:
    rows: np.ndarray
    packed: np.ndarray

    def wait(self):
        return self.rows, self.packed


def test_masks_are_by_slot_and_late(setup_row):
    allowed = np.zeros((1, 64), bool)
    allowed[0, [1, 33, 39]] = True
    packed = np.packbits(allowed, axis=1, bitorder="little").view("<u4")
    masks = Masks(np.array([5], np.int32), packed)
    logits = np.arange(VOCAB, dtype=np.float32)[None].repeat(2, 0)
    setups = [setup_row(temperature=0, row=2), setup_row(temperature=0, row=5, bad_words=((39,),))]
    assert sample(logits, setups, masks=masks).tokens.tolist() == [39, 33]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(setup_row, value, temperature):
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    options = {"temperature": temperature, "top_p": 0.9, "allowed_token_ids": [3, 4]}
    setups = [setup_row(row=i, **options) for i in range(3)]
    good = sample(logits, setups)
    logits[1, 17] = value
    bad = sample(logits, setups)
    assert bad.valid.tolist() == [True, False, True]
    assert bad.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()


def test_a_row_with_everything_ruled_out_fails_alone(setup_row):
    logits = np.zeros((2, VOCAB), np.float32)
    setups = [setup_row(allowed_token_ids=[3], bad_words=((3,),)), setup_row(row=1)]
    assert sample(logits, setups).valid.tolist() == [False, True]


def test_ids_past_the_vocabulary_are_harmless(setup_row):
    logits = np.zeros((1, VOCAB), np.float32)
    setup = setup_row(
        temperature=0,
        allowed_token_ids=[1, VOCAB + 3],
        bad_words=((VOCAB,), (1, VOCAB + 9)),
        stop_ids=(VOCAB + 1,),
        logit_bias={VOCAB + 2: 5.0},
        min_tokens=5,
    )
    assert sample(logits, [setup]).tokens.item() == 1


@given(st.lists(st.lists(st.integers(-3, 3), min_size=30, max_size=30), min_size=1, max_size=4), st.integers(1, 35))
def test_best_orders_ties_by_id(rows, width):
    values = torch.tensor(rows, dtype=torch.float32)
    top, ids = ranking.best(values, width)
    for line, got_values, got_ids in zip(rows, top.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(30), key=lambda i: (-line[i], i))[:width]
        assert got_ids == expected
        assert got_values == [line[i] for i in expected]
