"""The cases ST-*: events of a stream. docs/cases.md says what each case is about."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

FRANCE = "The capital of France is"
ALPHABET = "Here is the English alphabet: ABC"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}


def events(server, route, **body):
    """Return the chunks of a stream, whose bytes are in order, and what ends it."""
    reply = server.post(route, **body, stream=True)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    *found, end = reply.text.split("\n\n")
    assert end == "" and found[-1] == "data: [DONE]" and found.count("data: [DONE]") == 1
    assert all(event.startswith("data: ") and "\n" not in event for event in found)
    return [json.loads(event.removeprefix("data: ")) for event in found[:-1]]


def test_st_01_usage_comes_once_and_last(server):
    asked = {"messages": HELLO, "max_tokens": 5, **GREEDY}
    whole = server.ask("chat", **asked)
    *chunks, total = events(server, "chat", **asked, stream_options={"include_usage": True})
    usage = total["usage"]
    assert total["choices"] == [] and usage["completion_tokens"] == whole.tokens == 5
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (31, 36)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"include_usage": None}], ids=repr)
def test_st_02_usage_only_where_it_is_asked_for(server, options):
    chunks = events(server, "chat", messages=HELLO, max_tokens=3, stream_options=options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_st_02_options_of_a_stream_need_one(server, route):
    prompt = {"messages": HELLO} if route == "chat" else {"prompt": FRANCE}
    for stream in (False, None):
        error = server.refused(route, **prompt, max_tokens=3, stream=stream, stream_options={"include_usage": True})
        assert error["param"] == "stream_options"


@pytest.mark.parametrize(
    ("route", "body", "reason"),
    [
        ("completions", {"prompt": FRANCE, "max_tokens": 3}, "length"),
        ("chat", {"messages": HELLO, "max_tokens": 30}, "stop"),
        ("completions", {"prompt": FRANCE, "max_tokens": 3, "n": 2}, "length"),
    ],
)
def test_st_03_one_finish_reason_and_it_is_the_last(server, route, body, reason):
    choices = [choice for chunk in events(server, route, **body, **GREEDY) for choice in chunk["choices"]]
    for index in range(body.get("n", 1)):
        *earlier, last = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert last == reason and all(value is None for value in earlier)


@pytest.mark.parametrize(
    "body",
    [{"prompt": ALPHABET, "max_tokens": 20, "stop": ["GH"], **GREEDY}, {"prompt": FRANCE, "n": 2, "max_tokens": 3}],
)
def test_st_04_the_end_is_marked_once(server, body):
    with server.http.stream("POST", "/v1/completions", json={"model": "smollm2-135m", **body, "stream": True}) as reply:
        data = b"".join(reply.iter_raw())
    assert data.endswith(b"\n\ndata: [DONE]\n\n") and data.count(b"[DONE]") == 1


@pytest.mark.parametrize("body", [{"prompt": [260] * 257}, {"prompt": "x", "top_p": 7}, {"prompt": [10**6]}], ids=repr)
def test_st_06_what_is_wrong_before_the_first_token_has_a_status(tight, body):
    reply = tight.post("completions", **body, max_tokens=1, stream=True)
    assert reply.status_code == 400 and reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"} and "data:" not in reply.text


def test_st_07_sixteen_streams_do_not_mix(server):
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Count to 20"}],
        "max_tokens": 12,
        **GREEDY,
    }

    def one(_):
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
        *found, done, end = reply.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "") and all(event.startswith("data: {") for event in found)
        chunks = [json.loads(event.removeprefix("data: ")) for event in found]
        (head,) = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
        assert head[1] == "chat.completion.chunk"
        return head[0], "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    with ThreadPoolExecutor(16) as threads:
        ids, texts = zip(*threads.map(one, range(16)), strict=True)
    assert len(set(ids)) == 16 and len(set(texts)) == 1 and texts[0]


def test_st_09_every_chunk_has_a_choice_and_a_role_comes_once(server):
    chunks = events(server, "chat", messages=HELLO, max_tokens=5, **GREEDY)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    assert all(isinstance(delta.get("content", ""), str) for delta in deltas)
