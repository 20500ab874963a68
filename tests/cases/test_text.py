"""The cases DT-*: from tokens to text. docs/cases.md says what each case is about."""

from __future__ import annotations

import pytest

from slotline.text import TextStream

FRANCE = "The capital of France is"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
LLAMA = "\N{LLAMA}"


def pieces(vocabulary, ids):
    """Return what each token adds, then what the end adds."""
    stream = TextStream(vocabulary)
    return [*map(stream.push, ids), stream.finish()]


def test_dt_01_a_character_comes_with_its_last_byte(vocabulary):
    assert pieces(vocabulary, [10813, 116, 243, 10813, 116, 243]) == ["", "", LLAMA, "", "", LLAMA, ""]
    assert pieces(vocabulary, [143, 233, 26411]) == ["", "\u010f", " \u00e9", ""]


@pytest.mark.parametrize(("ids", "text"), [([10813, 116, 243], LLAMA), ([143, 233, 26411], "\u010f \u00e9")])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_dt_01_no_stream_breaks_a_character(server, route, ids, text):
    """Each token is the best until it was seen: then its logit is a tenth."""
    bias = {str(token_id): 100 - 30 * place for place, token_id in enumerate(ids)}
    asked = {"messages": HELLO} if route == "chat" else {"prompt": FRANCE}
    asked |= {"logit_bias": bias, "repetition_penalty": 10, "allowed_token_ids": ids, "max_tokens": 3}
    whole, streamed = server.both(route, **asked, **GREEDY)
    assert whole.text == streamed.text == text
    assert not [piece for piece in streamed.texts if "\ufffd" in piece]


def test_dt_03_bytes_that_are_no_character_wait_for_one_token(vocabulary):
    assert pieces(vocabulary, [143] * 3) == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_dt_03_bytes_that_are_no_character_are_shown(server):
    forced = {"max_tokens": 3, "logit_bias": {"143": 100}, **GREEDY}
    for answer in server.both("completions", prompt=FRANCE, **forced, logprobs=1):
        assert (answer.text, answer.finish_reason, answer.tokens) == ("\ufffd" * 3, "length", 3)
        assert answer.logprobs["tokens"] == [r"bytes:\xc4"] * 3 and answer.logprobs["text_offset"] == [0, 0, 1]
    assert server.ask("completions", prompt=FRANCE, **forced, stream=True).text == "\ufffd" * 3
    for answer in server.both("chat", messages=HELLO, **forced, logprobs=True):
        assert answer.text == "\ufffd" * 3
        assert [entry["bytes"] for entry in answer.logprobs["content"]] == [[196]] * 3


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}])
def test_dt_05_a_character_that_is_cut_short_is_shown_as_such(server, extra):
    forced = {"max_tokens": 1, "logit_bias": {"10813": 100}, **GREEDY}
    for answer in server.both("completions", prompt=FRANCE, **forced, **extra):
        assert (answer.text, answer.finish_reason, answer.tokens) == ("\ufffd", "length", 1)
    assert "Traceback" not in server.said()


def test_dt_06_spaces_are_kept(server):
    forced = {"max_tokens": 3, "logit_bias": {"260": 100}, **GREEDY}
    for answer in server.both("completions", prompt=FRANCE, **forced) + server.both("chat", messages=HELLO, **forced):
        assert (answer.text, answer.tokens) == (" the the the", 3)


@pytest.mark.parametrize(("fields", "text"), [({}, ""), ({"skip_special_tokens": False}, "<|im_end|>" * 4)])
def test_dt_07_control_tokens_show_when_asked_for(server, fields, text):
    forced = {"max_tokens": 4, "ignore_eos": True, "logit_bias": {"2": 100}, **GREEDY}
    for answer in server.both("completions", prompt=FRANCE, **forced, **fields):
        assert (answer.text, answer.finish_reason, answer.tokens) == (text, "length", 4)


def test_dt_07_the_end_of_a_turn_is_not_text(server):
    for answer in server.both("chat", messages=HELLO, max_tokens=30, **GREEDY):
        assert answer.finish_reason == "stop" and answer.tokens == 10
        assert answer.text == "Hello! How can I assist you today?"
