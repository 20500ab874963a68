"""The cases SP-*: stop strings. docs/cases.md says what each case is about."""

from __future__ import annotations

import pytest

FRANCE = "The capital of France is"
ALPHABET = "Here is the English alphabet: ABC"
GREEDY = {"temperature": 0}


def assert_all(answers, text, reason, tokens):
    for answer in answers:
        assert (answer.text, answer.finish_reason, answer.tokens) == (text, reason, tokens)


@pytest.mark.parametrize(("stop", "tokens"), [("DEFGHIJ", 4), ("DEFGHIJK", 5)])
def test_sp_01_a_stop_that_spans_tokens_never_shows(server, stop, tokens):
    whole, streamed = server.both("completions", prompt=ALPHABET, max_tokens=20, **GREEDY, stop=[stop])
    assert_all((whole, streamed), "", "stop", tokens)
    assert not any(streamed.texts)
    assert whole.bodies[0]["choices"][0]["stop_reason"] == streamed.bodies[-1]["choices"][0]["stop_reason"] == stop


def test_sp_02_what_was_held_back_is_released(server):
    asked = {"max_tokens": 5, "logit_bias": {"49": 100}, "stop": ["AB", "AAAAAAB"]}
    assert_all(server.both("completions", prompt=FRANCE, **GREEDY, **asked), "AAAAA", "length", 5)


@pytest.mark.parametrize(("fields", "text"), [({}, " th"), ({"include_stop_str_in_output": True}, " the t")])
def test_sp_03_a_match_inside_tokens_is_cut_exactly(server, fields, text):
    asked = {"max_tokens": 8, "logit_bias": {"260": 100}, "stop": "e t", **fields}
    assert_all(server.both("completions", prompt=FRANCE, **GREEDY, **asked), text, "stop", 2)


def test_sp_05_a_stop_is_text_and_not_a_token(server):
    assert_all(server.both("completions", prompt=FRANCE, max_tokens=16, **GREEDY, stop=["\n\n"]), " Paris.", "stop", 4)


@pytest.mark.parametrize("stop", ["", [""], [5], {}, ["x", ""], 7], ids=repr)
@pytest.mark.parametrize("stream", [False, True])
def test_sp_06_odd_stops_are_refused_by_name(server, stop, stream):
    error = server.refused("completions", prompt=FRANCE, max_tokens=4, **GREEDY, stop=stop, stream=stream)
    assert error["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None, False], ids=repr)
def test_sp_06_no_stop_is_no_stop(server, stop):
    asked = {"prompt": FRANCE, "max_tokens": 4, **GREEDY}
    assert_all(server.both("completions", **asked, stop=stop), " Paris.\n\n", "length", 4)


def test_sp_06_up_to_64_stops(server):
    stops = [f"never {number}" for number in range(65)]
    asked = {"prompt": FRANCE, "max_tokens": 4, **GREEDY}
    for count in (5, 64):
        assert_all(server.both("completions", **asked, stop=stops[:count]), " Paris.\n\n", "length", 4)
    assert server.refused("completions", **asked, stop=stops)["param"] == "stop"


@pytest.mark.parametrize("stop", [["x"] * 10_000, ["x" * 1_000_000]], ids=["many", "long"])
def test_sp_06_too_much_is_refused_quickly(server, stop):
    replies = [server.post("completions", prompt=FRANCE, max_tokens=4, stop=stop) for _ in range(3)]
    assert all(reply.status_code == 400 and reply.json()["error"]["param"] == "stop" for reply in replies)
    assert min(reply.elapsed.total_seconds() for reply in replies) < 1
    server.assert_alive()


@pytest.mark.parametrize("stop", ["ABC", "CD", "alphabet", ": ABCDEF"])
@pytest.mark.parametrize("echo", [False, True])
def test_sp_08_the_prompt_is_not_searched(server, stop, echo):
    for answer in server.both("completions", prompt=ALPHABET, max_tokens=6, **GREEDY, stop=[stop], echo=echo):
        assert answer.tokens == 6 and answer.finish_reason == "length"
        assert answer.text == (ALPHABET if echo else "") + "DEFGHIJKLM"


def test_sp_10_a_stop_that_never_comes_changes_nothing(server):
    asked = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 48, **GREEDY}
    stop = ["\N{BLACK FLORETTE}RESULT\N{BLACK FLORETTE}", "\N{BLACK FLORETTE}RETURN\N{BLACK FLORETTE}"]
    answers = server.both("chat", **asked) + server.both("chat", **asked, stop=stop)
    assert len({(answer.text, answer.finish_reason, answer.tokens) for answer in answers}) == 1
    assert answers[0].text
