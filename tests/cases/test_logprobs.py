"""The cases LP-*: logprobs as clients read them. docs/cases.md says what each case is about."""

from __future__ import annotations

import math
from typing import Any

import pytest

FRANCE = "The capital of France is"
ALPHABET = "Here is the English alphabet: ABC"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
NEAR = 1e-4


def near(one: Any, other: Any) -> bool:
    """Tell whether two pieces of JSON are equal, numbers with a decimal point nearly."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= NEAR
    return type(one) is type(other) and one == other


def numbers(logprobs: dict[str, list[Any]]) -> list[float | None]:
    """Return every value of a logprobs object of either route, those of candidates included."""
    if "content" in logprobs:
        entries = logprobs["content"]
        return [e["logprob"] for entry in entries for e in [entry, *entry["top_logprobs"]]]
    tops = [value for top in logprobs["top_logprobs"] if top is not None for value in top.values()]
    return logprobs["token_logprobs"] + tops


def assert_legal(values: list[float | None]) -> None:
    """Check that there are values, and that each is a log-probability."""
    assert values
    assert all(isinstance(v, float) and math.isfinite(v) and v <= 0 for v in values), values


# LP-01: what a mask leaves out


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_lp_01_masked_candidates_are_left_out(server, vocabulary, mode):
    ids = [i for i in range(len(vocabulary)) if vocabulary.spell(i) in ("yes", "no")]
    assert len(ids) == 2
    asked = {"messages": [{"role": "user", "content": "Answer yes or no: is water wet?"}], "logprobs_mode": mode}
    for answer in server.both(
        "chat", **asked, max_tokens=4, **GREEDY, logprobs=True, top_logprobs=20, allowed_token_ids=ids
    ):
        content = answer.logprobs["content"]
        assert_legal(numbers(answer.logprobs))
        assert len(content) == answer.tokens == 4 and {entry["token"] for entry in content} <= {"yes", "no"}
        for entry in content if mode == "processed" else ():
            best = entry["top_logprobs"]
            assert sorted(e["token"] for e in best) == ["no", "yes"] and best[0]["token"] == entry["token"]
            assert sum(math.exp(e["logprob"]) for e in best) == pytest.approx(1, abs=1e-5)


def test_lp_01_a_mask_and_a_temperature_leave_what_was_allowed(server, vocabulary):
    ids = [i for i in range(len(vocabulary)) if vocabulary.spell(i) in ("yes", "no")]
    asked = {"temperature": 1, "seed": 1, "logprobs": 20, "logprobs_mode": "processed", "allowed_token_ids": ids}
    for answer in server.both("completions", prompt=FRANCE, max_tokens=4, **asked):
        assert_legal(numbers(answer.logprobs))
        for top in answer.logprobs["top_logprobs"]:
            assert set(top) == {"yes", "no"}
            assert sum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("mode", "candidates"), [("raw", 5), ("processed", 1)])
def test_lp_01_top_k_of_one_leaves_one_candidate(server, mode, candidates):
    asked = {"temperature": 1, "top_k": 1, "logprobs": 5, "logprobs_mode": mode}
    for answer in server.both("completions", prompt=FRANCE, max_tokens=1, **asked):
        (top,) = answer.logprobs["top_logprobs"]
        assert answer.text == " Paris" and len(top) == candidates
        assert_legal(numbers(answer.logprobs))


def test_lp_01_a_schema_is_refused_by_name(server):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    assert server.refused("chat", messages=HELLO, response_format=schema)["param"] == "response_format"


# LP-03, LP-04, LP-05: which tokens, and in what shape


def test_lp_03_null_is_not_given(server):
    asked = {"messages": HELLO, "max_tokens": 3, **GREEDY, "logprobs": True}
    bare, null = server.ask("chat", **asked), server.ask("chat", **asked, top_logprobs=None)
    for entry in bare.logprobs["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and entry["top_logprobs"] == []
    assert len(bare.logprobs["content"]) == 3
    ignored = {"id", "created", "usage"}  # usage tells how much came from the prefix cache
    one, other = ({k: v for k, v in a.bodies[0].items() if k not in ignored} for a in (bare, null))
    assert near(one, other)


def test_lp_04_a_width_of_zero_gives_the_token_alone(server):
    for answer in server.both("completions", prompt=FRANCE, max_tokens=3, **GREEDY, logprobs=0):
        found = answer.logprobs
        assert {len(values) for values in found.values()} == {answer.tokens} == {3}
        assert_legal(found["token_logprobs"])
        pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
        assert found["top_logprobs"] == [{token: value} for token, value in pairs]
    for answer in server.both("chat", messages=HELLO, max_tokens=3, **GREEDY, logprobs=True, top_logprobs=0):
        assert len(answer.logprobs["content"]) == answer.tokens == 3
        assert all(entry["top_logprobs"] == [] for entry in answer.logprobs["content"])


def test_lp_04_not_asked_is_null(server):
    for answer in server.both("completions", prompt=FRANCE, max_tokens=3):
        assert answer.logprobs is None and all("logprobs" in body["choices"][0] for body in answer.bodies)
    for extra in ({}, {"logprobs": False}):
        for answer in server.both("chat", messages=HELLO, max_tokens=3, **extra):
            assert answer.logprobs is None and all("logprobs" in body["choices"][0] for body in answer.bodies)


def test_lp_05_chat_has_the_shape_of_chat(server):
    for answer in server.both("chat", messages=HELLO, max_tokens=3, **GREEDY, logprobs=True, top_logprobs=2):
        for body in answer.bodies:
            assert set(body["choices"][0]["logprobs"]) == {"content", "refusal"}
        for entry in answer.logprobs["content"]:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == 2
            assert all(set(best) == {"token", "logprob", "bytes"} for best in entry["top_logprobs"])


# LP-06: what is not possible


@pytest.mark.parametrize(
    ("route", "fields", "param", "said"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs", "only with logprobs true, then 0 to 20"),
        ("chat", {"logprobs": False, "top_logprobs": 2}, "top_logprobs", "only with logprobs true"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; allowed: 0 to 20"),
        ("chat", {"logprobs": True, "top_logprobs": 5000}, "top_logprobs", "top_logprobs is 5000; allowed: 0 to 20"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1; allowed: 0 to 20"),
        ("completions", {"logprobs": -1}, "logprobs", "logprobs is -1; allowed: 0 to 20"),
        ("completions", {"logprobs": 21}, "logprobs", "logprobs is 21; allowed: 0 to 20"),
        ("completions", {"logprobs": 21, "echo": True}, "logprobs", "logprobs is 21; allowed: 0 to 20"),
        ("completions", {"logprobs": True}, "logprobs", "allowed: an integer"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21; allowed: 0 to 20"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1; allowed: 0 to 20"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_lp_06_widths_out_of_range_are_named(server, route, fields, param, said, stream):
    prompt = {"messages": HELLO} if route == "chat" else {"prompt": FRANCE}
    error = server.refused(route, **prompt, max_tokens=1, **fields, stream=stream)
    assert error["param"] == param and said in error["message"]


def test_lp_06_the_server_lives_on(server):
    server.assert_alive()


# LP-07: spelling


def test_lp_07_tokens_are_spelt_as_text(server):
    for answer in server.both("completions", prompt=FRANCE, max_tokens=1, **GREEDY, logprobs=5):
        found = answer.logprobs
        assert found["tokens"] == [" Paris"] and "".join(found["tokens"]) == answer.text
        assert not [name for name in found["top_logprobs"][0] if "\u0120" in name or "\u2581" in name]


def test_lp_07_bytes_are_those_of_the_text(server):
    messages = [*HELLO, {"role": "assistant", "content": FRANCE}]
    asked = {"messages": messages, "continue_final_message": True, "logprobs": True, "top_logprobs": 5}
    for answer in server.both("chat", **asked, max_tokens=1, **GREEDY):
        (entry,) = answer.logprobs["content"]
        assert entry["token"] == " Paris" and entry["bytes"] == [32, 80, 97, 114, 105, 115]
        for best in entry["top_logprobs"]:
            assert best["bytes"] == list(best["token"].encode())


# LP-09: stops


def test_lp_09_a_stop_hides_text_and_no_token(server):
    asked = {"prompt": ALPHABET, "max_tokens": 20, **GREEDY, "stop": ["DEFGHIJ"], "logprobs": 2}
    whole, streamed = server.both("completions", **asked)
    for answer in (whole, streamed):
        assert (answer.text, answer.finish_reason, answer.tokens) == ("", "stop", 4)
        assert answer.logprobs["tokens"] == ["DEF", "GH", "I", "J"]
        assert {len(values) for values in answer.logprobs.values()} == {4}
    assert near(whole.logprobs, streamed.logprobs)


# LP-11, LP-12: the prompt itself


def test_lp_11_offsets_go_on_after_an_echoed_prompt(server):
    whole, streamed = server.both("completions", prompt=FRANCE, max_tokens=6, **GREEDY, echo=True, logprobs=1)
    for answer in (whole, streamed):
        tokens, offsets = answer.logprobs["tokens"], answer.logprobs["text_offset"]
        assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        assert answer.text == "".join(tokens) and answer.text.startswith(FRANCE + " Paris")
        assert len(tokens) == 5 + answer.tokens == 11
    assert near(whole.logprobs, streamed.logprobs)


def test_lp_12_a_prompt_is_scored_without_generating(server):
    text = FRANCE + " Paris"
    whole, streamed = server.both("completions", prompt=text, max_tokens=0, echo=True, logprobs=1, **GREEDY)
    for answer in (whole, streamed):
        usage = {name: answer.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert usage == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
        assert (answer.text, answer.finish_reason) == (text, "length")
        found = answer.logprobs
        assert "".join(found["tokens"]) == text and {len(values) for values in found.values()} == {6}
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        expected = [-11.539, -0.338, -2.439, -0.451, -0.258]
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=2e-3)
    assert near(whole.logprobs, streamed.logprobs)


# LP-13: the candidates


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.5, "seed": 3}], ids=["greedy", "sampled"])
def test_lp_13_candidates_are_sorted_and_distinct(server, sampling):
    messages = [{"role": "user", "content": "Name a colour."}]
    whole, streamed = server.both("chat", messages=messages, max_tokens=8, **sampling, logprobs=True, top_logprobs=20)
    assert near(whole.logprobs, streamed.logprobs)
    content = whole.logprobs["content"]
    for entry in content:
        best = entry["top_logprobs"]
        values = [candidate["logprob"] for candidate in best]
        assert len(best) == 20 and values == sorted(values, reverse=True)
        names = {bytes(candidate["bytes"]): candidate["logprob"] for candidate in best}
        assert len(names) == 20
        assert names.get(bytes(entry["bytes"]), entry["logprob"]) == pytest.approx(entry["logprob"], abs=1e-5)
        together = names | {bytes(entry["bytes"]): entry["logprob"]}
        assert sum(map(math.exp, together.values())) <= 1 + 1e-4
        assert sampling is not GREEDY or entry["logprob"] == values[0]
    lists = [tuple(candidate["token"] for candidate in entry["top_logprobs"]) for entry in content]
    assert len(set(lists)) == len(lists) == whole.tokens


# LP-15: the same in pieces


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": FRANCE, "logprobs": 2}),
        ("chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_lp_15_a_stream_has_the_values_of_the_whole(server, route, fields):
    asked = {**fields, "max_tokens": 8, **GREEDY}
    whole, streamed = server.both(route, **asked)
    assert near(whole.logprobs, streamed.logprobs) and whole.tokens == streamed.tokens == 8
    silent = {name: value for name, value in asked.items() if "logprobs" not in name}
    assert {answer.text for answer in (whole, streamed, *server.both(route, **silent))} == {whole.text}
