"""The cases SM-*: sampling, seeds, penalties. docs/cases.md says what each case is about."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

FRANCE = "The capital of France is"
GERMANY = "The capital of Germany is"
ONCE = "Once upon a time"
GREEDY = {"temperature": 0}


def texts(server, **body):
    """Return the texts of all choices of a whole answer."""
    reply = server.post("completions", **body)
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def together(server, bodies):
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: texts(server, **body)[0], bodies))


def test_sm_01_company_does_not_change_a_seeded_answer(server):
    seeded = {"prompt": FRANCE, "max_tokens": 16, "temperature": 0.8, "seed": 42, "ignore_eos": True}
    other = {"prompt": GERMANY, "max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
    (alone,) = texts(server, **seeded)
    assert [together(server, [seeded, other])[0] for _ in range(2)] == [alone] * 2
    assert together(server, [other] * 4 + [seeded] + [other] * 3)[4] == alone


def test_sm_03_without_a_seed_answers_differ(server):
    asked = {"prompt": ONCE, "max_tokens": 16, "temperature": 1.0}
    assert len({texts(server, **asked)[0] for _ in range(5)}) >= 2
    assert len(set(together(server, [asked] * 8))) >= 2


def test_sm_04_choices_differ_and_come_again_with_their_seed(server):
    asked = {"prompt": ONCE, "n": 4, "seed": 7, "max_tokens": 16}
    found = texts(server, **asked, temperature=1.0)
    assert len(found) == 4 and len(set(found)) >= 2 and texts(server, **asked, temperature=1.0) == found
    assert len(set(texts(server, **asked, **GREEDY))) == 1


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-6}, {"temperature": 1e-30}, {"top_p": 0.1, "top_k": 3, "seed": 9}]
)
def test_sm_05_hardly_any_temperature_is_none(server, fields):
    assert texts(server, prompt=FRANCE, max_tokens=1, **{**GREEDY, **fields}) == [" Paris"]


def test_sm_06_penalties_do_not_count_the_prompt(server):
    asked = {"prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 1, **GREEDY}
    for penalty in ("frequency_penalty", "presence_penalty"):
        assert texts(server, **asked, **{penalty: 2.0}) == [" "]


@pytest.mark.parametrize(
    "bias",
    [{"49152": 1}, {"191222": -100}, {"-1": 1}, {"AI": -100}, {"05": 1}, {"5": 1000}, {"5": "x"}, {"5": None}, [5]],
    ids=repr,
)
def test_sm_08_biases_that_cannot_be_are_refused_by_name(server, bias):
    assert server.refused("completions", prompt=FRANCE, max_tokens=1, logit_bias=bias)["param"] == "logit_bias"


def test_sm_08_a_bias_that_is_no_number_is_no_json(server):
    body = b'{"model": "smollm2-135m", "prompt": "x", "logit_bias": {"5": NaN}}'
    reply = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    server.assert_alive()


def test_sm_10_end_tokens_wait_for_min_tokens(server):
    asked = {"prompt": FRANCE, "min_tokens": 5, "max_tokens": 10, "logit_bias": {"2": 100}, **GREEDY}
    for answer in server.both("completions", **asked):
        assert (answer.finish_reason, answer.tokens) == ("stop", 6)  # the end token counts, everywhere


def test_sm_10_stop_ids_wait_for_min_tokens(server):
    asked = {"prompt": FRANCE, "min_tokens": 5, "max_tokens": 10, "logit_bias": {"42": 100}, "stop_token_ids": [42]}
    for answer in server.both("completions", **asked, **GREEDY):
        assert answer.tokens == 6 and answer.finish_reason == "stop" and ":" not in answer.text


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 9, "max_tokens": 4}, {"min_tokens": -1}, {"min_tokens": 17}], ids=repr
)
def test_sm_10_more_than_the_most_is_refused(server, fields):
    assert server.refused("completions", prompt=FRANCE, **fields)["param"] == "min_tokens"


def test_sm_12_greedy_answers_are_those_without_company(server):
    own = {"max_tokens": 8, "ignore_eos": True, **GREEDY}
    bodies = [{"prompt": [1000 + i] * (1 + i * 6), **own} for i in range(16)]
    alone = [texts(server, **body)[0] for body in bodies[::3]]
    assert together(server, bodies)[::3] == alone


def test_sm_13_best_of_is_at_least_n(server):
    assert server.refused("completions", prompt=FRANCE, n=2, best_of=1)["param"] == "best_of"
    assert server.refused("completions", prompt=FRANCE, best_of=2, stream=True)["param"] == "best_of"


def test_sm_13_the_best_of_four_are_two_of_them(server):
    asked = {"prompt": ["example 1", "example 2"], "max_tokens": 4, "seed": 3, "temperature": 1, "ignore_eos": True}
    every = server.post("completions", **asked, n=4, logprobs=0).json()
    best = server.post("completions", **asked, n=2, best_of=4).json()
    assert [(choice["index"], choice["logprobs"]) for choice in best["choices"]] == [(i, None) for i in range(4)]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 2 * 4 * 4
    for prompt in range(2):
        made = every["choices"][prompt * 4 : prompt * 4 + 4]
        ranked = sorted(made, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        shown = best["choices"][prompt * 2 : prompt * 2 + 2]
        assert [choice["text"] for choice in shown] == [choice["text"] for choice in ranked[:2]]
