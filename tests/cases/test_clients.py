"""Clients that people use, as they come: OpenAI's own, sync and async, then LangChain and LiteLLM over it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

import slotline
from slotline.apis.openai import create_app

MODEL = "smollm2-135m"
FRANCE = "The capital of France is"
HELLO = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello! How can I assist you today?"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def url(server):
    return f"{server.url}/v1"


# OpenAI's client, sync


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert caught.value.code == "model_not_found"


def test_completions_of_every_form(client):
    ids = [504, 3575, 282, 4649, 314]
    for prompt in (FRANCE, [FRANCE], ids, [ids]):
        done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, **GREEDY)
        assert done.choices[0].text == " Paris" and done.usage.prompt_tokens == 5
        assert done.usage.prompt_tokens_details.cached_tokens >= 0
    done = client.completions.create(model=MODEL, prompt=[FRANCE, "a"], max_tokens=2, n=2, best_of=2, seed=1)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    extra = {"top_k": 1, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5], "repetition_penalty": 1.1}
    done = client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=3, extra_body=extra)
    assert done.usage.completion_tokens == 3


def test_a_conversation_of_some_turns(client):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    for _ in range(2):
        done = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, **GREEDY)
        messages += [done.choices[0].message, {"role": "user", "content": "Go on."}]  # as the client gives it
    assert done.choices[0].message.role == "assistant" and done.usage.total_tokens > 0


def test_a_chat_is_streamed_with_usage(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=30, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert last.choices == [] and last.usage.completion_tokens == 10 and chunks[-1].choices[0].finish_reason == "stop"


def test_the_stream_helper_accumulates_what_the_whole_answer_is(client):
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, max_tokens=30, logprobs=True, top_logprobs=2, **GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=30, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert done.choices[0].message.content == whole.choices[0].message.content == ANSWER
    tokens = [[entry.token for entry in choices[0].logprobs.content] for choices in (done.choices, whole.choices)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 10


def test_raw_answers_and_request_ids(client):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().choices[0].message.content
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1)._request_id.startswith("cmpl-")


def test_a_stream_is_left(client, server):
    with client.completions.create(
        model=MODEL, prompt=FRANCE, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    server.assert_alive()


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"temperature": 7}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_of_the_clients_own_classes(client, fields, kind, param, stream):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": stream, **fields})
    assert caught.value.param == param and param in caught.value.message


# OpenAI's client, async


async def test_many_at_once(server, url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def whole():
            done = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, **GREEDY)
            return done.choices[0].message.content

        async def streamed():
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=30, stream=True, **GREEDY
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def completion():
            stream = await client.completions.create(model=MODEL, prompt=FRANCE, max_tokens=1, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        found = await asyncio.gather(*(ask() for ask in (whole, streamed, completion) for _ in range(3)))
        assert found == [ANSWER] * 6 + [" Paris"] * 3
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nope", prompt="x")


async def test_a_full_line_is_told_and_tried_again():
    async with slotline.Engine.open("echo", backend="echo", max_slots=1, max_queue=0, echo_delay=0.001) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=http, max_retries=0
        ) as client:
            ask = client.completions.create
            asked = [ask(model="echo", prompt="abc", max_tokens=60, extra_body={"ignore_eos": True}) for _ in range(2)]
            one, other = await asyncio.gather(*asked, return_exceptions=True)
            assert one.choices[0].text and isinstance(other, openai.InternalServerError) and other.status_code == 503
            patient = client.with_options(max_retries=2).completions.create
            found = await asyncio.gather(*(patient(model="echo", prompt="abc", max_tokens=3) for _ in range(2)))
            assert [done.choices[0].text for done in found] == ["abc", "abc"]


# LangChain and LiteLLM


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    with httpx.Client() as http:
        options = {"base_url": url, "api_key": "none", "model": MODEL, "max_retries": 0, "http_client": http}
        chat = langchain.ChatOpenAI(**options, **GREEDY, max_tokens=30, stream_usage=True)
        done = chat.invoke("Hello")
        assert done.content == ANSWER and done.usage_metadata["output_tokens"] == 10
        assert "".join(chunk.content for chunk in chat.stream("Hello")) == ANSWER
        assert [message.content for message in chat.batch(["Hello", "Hello"])] == [ANSWER] * 2
        logged = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello").response_metadata["logprobs"]
        assert len(logged["content"]) == 10
        assert langchain.OpenAI(**options, **GREEDY, max_tokens=1).invoke(FRANCE) == " Paris"
        embed = langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
        (vector,) = embed.embed_documents(["Hello"])
        assert len(vector) == 576 and sum(v * v for v in vector) == pytest.approx(1, abs=1e-3)


async def test_langchain_async(url):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    async with httpx.AsyncClient() as http:
        chat = langchain.ChatOpenAI(
            base_url=url, api_key="none", model=MODEL, max_tokens=30, http_async_client=http, **GREEDY
        )
        assert (await chat.ainvoke([("system", "Be brief."), ("user", "Hello")])).content
        assert "".join([chunk.content async for chunk in chat.astream("Hello")]) == ANSWER


@pytest.mark.timeout(180)
def test_litellm(url):
    """It needs an environment of its own, for it is at odds with a pin of this one; `make test-clients` makes it."""
    python = os.environ.get("SLOTLINE_LITELLM_PYTHON")
    if python is None:
        pytest.skip("SLOTLINE_LITELLM_PYTHON names no interpreter that has LiteLLM; `make test-clients` runs this")
    script = Path(__file__).with_name("litellm_smoke.py")
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices
    done = subprocess.run(
        [python, str(script), url, MODEL, ANSWER], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "all as expected" in done.stdout, done.stdout + done.stderr
