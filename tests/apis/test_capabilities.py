"""What a server says it can do, and what happens to a request that wants more."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

import slotline
from slotline.apis.openai import create_app
from slotline.testing.tiny import write_tiny_llama

API_SERVER = Path(__file__).resolve().parents[2] / "docs" / "api_server.md"
ECHO = slotline.EngineConfig(model="echo", backend="echo")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
async def narrow(anyio_backend, tmp_path_factory):
    """Open a real engine that allows 5 logprobs, where its backend could do 1024."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"))
    options = {"backend": "torch", "device": "cpu", "max_logprobs": 5, "kv_cache_tokens": 1024, "threads": 1}
    async with slotline.Engine.open(str(folder), **options) as engine:
        yield engine


@pytest.fixture
async def silent():
    """Open an engine whose backend has no logprobs."""
    async with slotline.Engine.open(config=ECHO) as engine:
        yield engine


async def capabilities(fake, engine, **options):
    async with fake.client(create_app(engine, **options)) as client:
        return (await client.get("/v1/capabilities")).json()


async def test_a_server_says_all_that_its_backend_says(fake, narrow):
    shown = await capabilities(fake, narrow, served_model_name=["m", "other"])
    own = {"version": slotline.__version__, "backend": "torch", "model": "m", "models": ["m", "other"]}
    own["max_model_len"] = 1024
    assert {name: shown.pop(name) for name in own} == own
    assert shown.pop("max_logprobs") == 5
    for name, value in shown.items():
        said = getattr(narrow.capabilities, name)
        assert value == (
            sorted(said) if isinstance(said, frozenset) else list(said) if isinstance(said, tuple) else said
        )
    assert set(shown) | {"max_logprobs"} == {field.name for field in fields(slotline.Capabilities)}
    assert shown["logprobs"] and shown["prompt_logprobs"] and shown["logprobs_modes"] == ["raw", "processed"]


async def test_a_backend_without_logprobs_says_so(fake, silent):
    shown = await capabilities(fake, silent)
    assert (shown["logprobs"], shown["prompt_logprobs"], shown["max_logprobs"]) == (False, False, 0)


async def test_the_page_documents_every_field(fake, silent):
    shown = await capabilities(fake, silent)
    table = API_SERVER.read_text(encoding="utf-8").partition("### What a server can do")[2].partition("\n## ")[0]
    assert not [name for name in shown if f"`{name}`" not in table]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "logprobs"),
        ("/v1/completions", {"prompt": "a"}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("value", [-1, 6, 21, 1024, 1025])
async def test_the_limit_is_the_servers_own(fake, narrow, path, fields, param, value):
    async with fake.client(create_app(narrow, served_model_name="m")) as client:
        reply = await client.post(path, json={"model": "m", "max_tokens": 1, **fields, param: value})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, "invalid_parameter")
    assert error["message"].startswith(f"{param} is {value}; allowed: 0 to 5")
    assert ("max_logprobs" in error["message"].removeprefix(param)) == (value > 5)


async def test_the_limit_itself_is_allowed(fake, narrow):
    async with fake.client(create_app(narrow, served_model_name="m")) as client:
        body = {"model": "m", "prompt": "the dog", "max_tokens": 2, "logprobs": 5, "ignore_eos": True}
        reply = await client.post("/v1/completions", json=body)
    found = reply.json()["choices"][0]["logprobs"]
    assert [len(top) in (5, 6) for top in found["top_logprobs"]] == [True, True]


# A backend without logprobs answers, and says what is missing


@pytest.mark.parametrize(
    ("path", "fields", "missing"),
    [
        ("/v1/completions", {"prompt": "abc", "logprobs": 2}, ["logprobs"]),
        ("/v1/completions", {"prompt": "abc", "logprobs": 0, "echo": True}, ["logprobs", "prompt_logprobs"]),
        ("/v1/completions", {"prompt": "abc", "prompt_logprobs": 1}, ["prompt_logprobs"]),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True}, ["logprobs"]),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "seed": 1},
            ["seed", "logprobs"],
        ),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_what_is_missing_is_said_whole_and_in_the_first_chunk(fake, silent, path, fields, missing, n):
    body = {"model": "echo", "max_tokens": 3, "n": n, **fields}
    async with fake.client(create_app(silent)) as client:
        whole = (await client.post(path, json=body)).json()
        events = fake.events((await client.post(path, json={**body, "stream": True})).text)
    chunks = [json.loads(event) for event in events[:-1]]
    assert [(w["code"], w["param"]) for w in whole["warnings"]] == [(f"{name}_unsupported", name) for name in missing]
    assert all(w["message"] for w in whole["warnings"])
    assert chunks[0]["warnings"] == whole["warnings"] and not any("warnings" in chunk for chunk in chunks[1:])
    for choice in [choice for answer in (whole, *chunks) for choice in answer["choices"]]:
        assert choice["logprobs"] is None and not choice.get("prompt_logprobs")


async def test_a_width_out_of_range_is_refused_there_too(fake, silent):
    async with fake.client(create_app(silent)) as client:
        for value in (-1, 21):
            reply = await client.post("/v1/completions", json={"model": "echo", "prompt": "abc", "logprobs": value})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "logprobs"
