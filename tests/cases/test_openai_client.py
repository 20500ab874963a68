"""OpenAI's own client reads all of it into its typed objects, whole and streamed."""

from __future__ import annotations

import math

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from pydantic import BaseModel

MODEL = "smollm2-135m"
CHINESE = "上海是"
QUESTION = [{"role": "user", "content": "请用一句话介绍上海"}]
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def unknown(value):
    """Yield the name of each field that the client's types do not have."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item)


def chat(client, **fields):
    """Return the content of chat logprobs, and the text; streamed or whole."""
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, **fields)
    if isinstance(done, ChatCompletion):
        chunks, parts = [done], [done.choices[0].message.content]
    else:
        chunks = list(done)
        assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
        parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert set().union(*map(unknown, chunks)) <= {"stop_reason"}
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    return [entry for logprobs in found for entry in logprobs.content], "".join(parts)


def completions(client, **fields):
    """Return the four lists of completions logprobs, and the text; streamed or whole."""
    done = client.completions.create(model=MODEL, **fields)
    chunks = [done] if isinstance(done, Completion) else list(done)
    assert all(isinstance(chunk, Completion) for chunk in chunks)
    assert set().union(*map(unknown, chunks)) <= {"stop_reason"}
    choices = [choice for chunk in chunks for choice in chunk.choices]
    found = [choice.logprobs for choice in choices if choice.logprobs is not None]
    lists = [
        [item for logprobs in found for item in getattr(logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    return lists, "".join(choice.text for choice in choices)


def test_the_chat_call_of_the_request(client):
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 10, "temperature": 0}
    content, text = chat(client, **asked)
    streamed, streamed_text = chat(client, **asked, stream=True)
    assert len(content) == 10 and text
    for entry in content:
        assert isinstance(entry, ChatCompletionTokenLogprob) and isinstance(entry.logprob, float)
        assert len(entry.top_logprobs) == 2 and all(isinstance(best, TopLogprob) for best in entry.top_logprobs)
        assert entry.top_logprobs[0].token == entry.token
    assert bytes(byte for entry in content for byte in entry.bytes).decode(errors="replace") == text == streamed_text
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in content], abs=1e-4)


def test_the_completions_call_of_the_request(client):
    asked = {"prompt": CHINESE, "logprobs": 2, "max_tokens": 10, "temperature": 0}
    (tokens, values, tops, offsets), text = completions(client, **asked)
    streamed, streamed_text = completions(client, **asked, stream=True)
    assert len(tokens) == len(values) == len(tops) == len(offsets) == 10 and text == streamed_text
    assert all(isinstance(value, float) and math.isfinite(value) and value <= 0 for value in values)
    assert all(len(top) == 2 and top[token] == max(top.values()) for token, top in zip(tokens, tops, strict=True))
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    assert streamed[0] == tokens and streamed[3] == offsets
    assert streamed[1] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_calls_work_as_written(client, stream):
    """Without a temperature: what is sampled differs, the shape does not."""
    content, _ = chat(client, logprobs=True, top_logprobs=2, max_tokens=10, stream=stream)
    assert 1 <= len(content) <= 10 and {len(entry.top_logprobs) for entry in content} == {2}
    (tokens, *others), _ = completions(client, prompt=CHINESE, logprobs=2, max_tokens=10, stream=stream)
    assert 1 <= len(tokens) <= 10 and {len(values) for values in others} == {len(tokens)}
    assert {len(top) for top in others[1]} <= {2, 3}  # a third where the token is not among the two


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_have_their_bytes(client, stream):
    biased = {"logit_bias": {"143": 100}, "max_tokens": 3, "temperature": 0, "stream": stream}
    content, text = chat(client, logprobs=True, top_logprobs=1, **biased)
    assert [(entry.token, entry.bytes) for entry in content] == [(r"bytes:\xc4", [0xC4])] * 3
    assert text == "\ufffd" * 3
    (tokens, *_), _ = completions(client, prompt=CHINESE, logprobs=1, **biased)
    assert tokens == [r"bytes:\xc4"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored(client, stream):
    asked = {"prompt": FRANCE + " Paris", "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    (tokens, values, _, offsets), text = completions(client, **asked)
    assert text == "".join(tokens) == FRANCE + " Paris" and offsets[-1] == len(FRANCE)
    assert values[0] is None and values[-1] == pytest.approx(-0.258, abs=2e-3)


def test_choices_have_their_own(client):
    asked = {"n": 3, "temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 1, "max_tokens": 6}
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, **asked)
    assert sum(len(choice.logprobs.content) for choice in done.choices) == done.usage.completion_tokens
    for choice in done.choices:
        data = bytes(b for entry in choice.logprobs.content if entry.token != "<|im_end|>" for b in entry.bytes)
        assert data.decode(errors="replace") == choice.message.content


def test_refusals_name_the_field(client):
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError) as found:
            client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, **fields)
        assert found.value.param == "top_logprobs" and "20" in found.value.message
