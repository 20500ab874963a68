"""What a step does with its rows: ends, failures, feedback, logprobs, processors."""

import warnings

import numpy as np
import pytest
import torch

from slotline.backend import ALL_PARAMS
from slotline.errors import InvalidParameter, ModelError
from slotline.plan import NO_LOGPROBS, Status
from slotline.plugins.processors import NoRepeatNgram
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.plugins.torch_backend.decoder import Decoder
from slotline.testing import Work

PROMPT = [5, 17, 3, 88, 41]


def test_capabilities_are_known_before_load():
    backend = TorchBackend()
    backend.processors = {"twice": NoRepeatNgram}
    assert backend.capabilities.params == ALL_PARAMS
    assert backend.capabilities.processors == {"twice"}
    backend.close()


def test_a_model_without_weights_is_refused(tiny, load):
    from dataclasses import replace

    _, model = tiny()
    with pytest.raises(ModelError, match="backend echo"):
        load(replace(model, checkpoint=None))


def test_a_stop_ends_the_row_on_the_device(tiny, load, generate):
    hf, model = tiny()
    answer = generate(hf, PROMPT, 6)
    stop = answer[2]
    driver = load(model)
    driver.admit(0, PROMPT, stop_ids=[stop])
    driver.admit(1, PROMPT)
    driver.step(Work(0, 5), Work(1, 5))
    driver.step(Work(0, 1), Work(1, 1))
    result = driver.step(Work(0, 1), Work(1, 1))
    assert result.status.tolist() == [Status.STOP, Status.OK]
    assert result.tokens[:, 0].tolist() == [stop, stop]
    result = driver.step(Work(0, 1), Work(1, 1))  # launched before the end was known
    assert result.status.tolist() == [Status.DEAD, Status.OK]
    assert result.n_tokens.tolist() == [0, 1]
    assert int(result.tokens[1, 0]) == answer[3]
    assert driver.step(Work(0, 1)).status.tolist() == [Status.DEAD]  # and nobody else there


def test_a_released_row_is_forgotten(tiny, load):
    _, model = tiny()
    driver = load(model)
    driver.admit(0, PROMPT)
    expected = driver.decode(0, 3)
    driver.backend.release([0, 7])
    driver.admit(0, PROMPT)
    assert driver.decode(0, 3) == expected


def test_a_plan_for_another_occupant_fails(tiny, load):
    _, model = tiny()
    driver = load(model)
    first = driver.admit(0, PROMPT)
    driver.step(Work(0, 5))
    driver.end(0)
    driver.admit(0, PROMPT)
    driver.step(Work(0, 5))
    driver.setups[0] = first
    with pytest.raises(RuntimeError, match="epoch"):
        driver.step(Work(0, 1))


class Broken(Decoder):
    """Give one token NaN, and raise at another."""

    def logits(self, hidden):
        logits = super().logits(hidden)
        if self.nan_at is not None:
            logits[self.nan_at] = float("nan")
        return logits

    def hidden(self, *inputs):
        if self.error is not None:
            raise self.error
        return super().hidden(*inputs)


@pytest.fixture
def broken(tiny, load):
    _, model = tiny()
    driver = load(model)
    decoder = driver.backend._runner._decoder
    decoder.__class__ = Broken
    decoder.nan_at = decoder.error = None
    return driver, decoder


def test_a_nan_row_fails_alone(broken):
    driver, decoder = broken
    options = {"logprobs": 2, "temperature": 1.0}
    for row in range(3):
        driver.admit(row, PROMPT, seed=row, **options)
    driver.step(*(Work(row, 5) for row in range(3)))
    decoder.nan_at = 1
    result = driver.step(*(Work(row, 1) for row in range(3)))
    assert result.status.tolist() == [Status.OK, Status.NAN, Status.OK]
    assert len(result.logprobs) == 2
    decoder.nan_at = None
    result = driver.step(*(Work(row, 1) for row in range(3)))
    assert result.status.tolist() == [Status.OK, Status.DEAD, Status.OK]
    driver.end(1)
    driver.admit(1, PROMPT, seed=1, **options)
    assert driver.step(Work(1, 5), Work(0, 1)).status.tolist() == [Status.OK, Status.OK]


def test_nan_left_in_pages_harms_no_later_row(tiny, load, generate):
    hf, model = tiny()
    driver = load(model, kv_cache_tokens=64)
    with torch.inference_mode():
        driver.backend._runner._pool.fill_(float("nan"))
    for row, length in enumerate((5, 9, 1)):
        driver.admit(row, [*PROMPT, *PROMPT][:length])
    steps = [driver.step(Work(0, 5), Work(1, 9), Work(2, 1))]
    steps += [driver.step(Work(0, 1), Work(1, 1), Work(2, 1)) for _ in range(4)]
    for row, length in enumerate((5, 9, 1)):
        assert [int(s.tokens[row, 0]) for s in steps] == generate(hf, [*PROMPT, *PROMPT][:length], 5)


def test_what_a_step_raises_comes_out_of_its_result(broken):
    driver, decoder = broken
    driver.admit(0, PROMPT)
    decoder.error = ValueError("device on fire")
    handle = driver.launch(Work(0, 5))
    with pytest.raises(ValueError, match="on fire"):
        driver.fetch(handle)
    decoder.error = None
    driver.end(0)
    driver.admit(0, PROMPT)
    assert driver.step(Work(0, 5)).status.tolist() == [Status.OK]


def test_fed_back_tokens_are_those_sampled(tiny, load):
    _, model = tiny()
    driver = load(model)
    driver.admit(0, PROMPT, temperature=1.0, seed=3)
    expected = driver.decode(0, 6)
    driver.admit(1, PROMPT, temperature=1.0, seed=3)
    got = [int(driver.step(Work(1, 5)).tokens[0, 0])]
    for _ in range(5):
        driver.tell(1, got[-1])
        got.append(int(driver.step(Work(1, 1)).tokens[0, 0]))
    assert got == expected


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_of_sampled_tokens(tiny, load, mode):
    hf, model = tiny()
    driver = load(model)
    banned = 11
    options = {"temperature": 0.7, "logit_bias": {banned: -100}, "top_k": 5, "logprobs_mode": mode}
    widths = [0, 3, NO_LOGPROBS, 97, 8]
    for row, width in enumerate(widths):
        driver.admit(row, PROMPT, logprobs=width, seed=row, **options)
    result = driver.step(*(Work(row, 5) for row in range(5)))
    with torch.inference_mode():
        logits = hf(torch.tensor([PROMPT])).logits[0, -1].numpy().copy()
    if mode == "processed":
        logits[banned] -= 100
        logits = np.where(logits >= np.sort(logits)[-5], logits / 0.7, -np.inf)
    expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    order = sorted(range(97), key=lambda i: (-expected[i], i))
    for row, width in enumerate(widths):
        entry, token = result.logprobs.slice(row, row + 1), int(result.tokens[row, 0])
        if width == NO_LOGPROBS:
            assert not len(entry.ids)
            continue
        finite = [i for i in order[:width] if np.isfinite(expected[i])]
        assert entry.ids.tolist() == [token, *[i for i in finite if i != token]]
        np.testing.assert_allclose(entry.values, expected[entry.ids], atol=1e-4)
        assert entry.ranks.tolist() == [order.index(i) + 1 for i in entry.ids.tolist()]


def test_prompt_logprobs_begin_where_they_are_wanted(tiny, load):
    from dataclasses import replace

    _, model = tiny()
    driver = load(model)
    driver.admit(0, list(range(30)), prompt_logprobs=1)
    whole = driver.step(Work(0, 30)).prompt_logprobs
    assert len(whole) == 29
    setup = driver.admit(1, list(range(30)), prompt_logprobs=1)
    driver.setups[1] = driver._admitted[0] = replace(setup, prompt_logprobs_from=12)
    counts, tables = [], []
    for chunk in (5, 10, 15):
        result = driver.step(Work(1, chunk, sample=chunk == 15))
        counts += result.prompt_counts.tolist()
        tables.append(result.prompt_logprobs)
    assert counts == [0, 4, 14]
    np.testing.assert_allclose(tables[2].values, whole.slice(15, 29).values, atol=1e-4)


def test_prompt_logprobs_are_scored_in_pieces(tiny, load, monkeypatch):
    _, model = tiny()
    driver = load(model)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 97, 300)]
    seen = []
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, h: seen.append(len(h)) or logits(self, h))
    driver.admit(0, prompt, prompt_logprobs=2)
    driver.admit(1, prompt[:4])
    result = driver.step(Work(0, 300, sample=False), Work(1, 4))
    assert seen == [256, 43, 1]
    assert result.prompt_counts.tolist() == [299, 0]


def test_no_repeat_ngram(tiny, load):
    _, model = tiny()
    backend = TorchBackend()
    backend.processors = {"no_repeat_ngram": NoRepeatNgram}
    driver = load(model, backend)
    prompt = [1, 2, 3, 1, 2]
    driver.admit(0, prompt, extra={"no_repeat_ngram": {"size": 3}}, logit_bias={3: 90, 4: 80}, max_tokens=32)
    driver.admit(1, prompt, logit_bias={3: 90, 4: 80}, max_tokens=32)
    steps = [driver.step(Work(0, 5), Work(1, 5)), *[driver.step(Work(0, 1), Work(1, 1)) for _ in range(19)]]
    with_it = prompt + [int(s.tokens[0, 0]) for s in steps]
    without = [int(s.tokens[1, 0]) for s in steps]
    triples = [tuple(with_it[i : i + 3]) for i in range(len(with_it) - 2)]
    assert len(set(triples)) == len(triples)
    assert with_it[5] == 4 and set(without) == {3}


def test_no_repeat_of_single_tokens(tiny, load):
    _, model = tiny()
    backend = TorchBackend()
    backend.processors = {"no_repeat_ngram": NoRepeatNgram}
    driver = load(model, backend)
    driver.admit(0, PROMPT, extra={"no_repeat_ngram": {"size": 1}}, max_tokens=32)
    answer = driver.decode(0, 30)
    assert len({*PROMPT, *answer}) == 35


@pytest.mark.parametrize("args", [None, 3, {"size": 0}, {"size": True}, {"size": 2, "other": 1}, {}])
def test_options_of_a_processor_are_checked(tiny, load, args):
    with pytest.raises(InvalidParameter, match="no_repeat_ngram"):
        NoRepeatNgram.check(args)
    _, model = tiny()
    backend = TorchBackend()
    backend.processors = {"no_repeat_ngram": NoRepeatNgram}
    driver = load(model, backend)
    driver.admit(0, PROMPT, extra={"no_repeat_ngram": args})
    driver.admit(1, PROMPT)
    with warnings.catch_warnings():
        result = driver.step(Work(0, 5), Work(1, 5))
    assert result.status.tolist() == [Status.NAN, Status.OK]
