"""Prompts as vectors: OpenAI's shapes, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest

import slotline
from slotline.apis.openai import create_app
from slotline.testing.tiny import write_tiny_llama


@pytest.fixture(scope="module")
async def tiny(anyio_backend, tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"))
    options = {"backend": "torch", "device": "cpu", "kv_cache_tokens": 1024, "threads": 1, "max_slots": 4}
    async with slotline.Engine.open(str(folder), **options) as engine:
        yield engine


async def embed(fake, engine, status=200, **fields):
    async with fake.client(create_app(engine, served_model_name="m")) as client:
        reply = await client.post("/v1/embeddings", json={"model": "m", **fields})
    assert reply.status_code == status, reply.text
    return reply.json() if status == 200 else reply.json()["error"]


async def test_every_form_of_input_gives_unit_vectors_in_order(fake, tiny):
    texts = ["a text", "another one"]
    both = await embed(fake, tiny, input=texts)
    ids = [tiny.encode(text) for text in texts]
    assert both["object"] == "list" and both["model"] == "m" and "warnings" not in both
    assert both["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert [(d["object"], d["index"]) for d in both["data"]] == [("embedding", 0), ("embedding", 1)]
    vectors = np.array([d["embedding"] for d in both["data"]])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)
    for given in (ids, [ids[0]], ids[0], texts[0]):
        found = (await embed(fake, tiny, input=given))["data"]
        assert len(found) == (2 if given is ids else 1)
        assert found[0]["embedding"] == pytest.approx(vectors[0], abs=1e-5)


async def test_base64_holds_the_same_floats(fake, tiny):
    plain = (await embed(fake, tiny, input="x"))["data"][0]["embedding"]
    coded = await embed(fake, tiny, input="x", encoding_format="base64", dimensions=len(plain))
    data = base64.b64decode(coded["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4") == pytest.approx(plain, abs=1e-6)


async def test_openais_client_reads_them(fake, tiny):
    app = create_app(tiny, served_model_name="m")
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=fake.client(app)) as client:
        found = await client.embeddings.create(model="m", input="x")
    plain = (await embed(fake, tiny, input="x"))["data"][0]["embedding"]
    assert found.data[0].embedding == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 3}, "dimensions"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x" * 5000}, "input"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(fake, tiny, fields, param):
    assert (await embed(fake, tiny, 400, **fields))["param"] == param


async def test_a_backend_without_hidden_states_says_why(fake):
    async with slotline.Engine.open("echo", backend="echo") as engine:
        error = await embed(fake, engine, 400, input="x")
    assert error["code"] == "unsupported_parameter" and "no hidden states" in error["message"]
    assert error["param"] == "input"


def test_a_pipeline_embeds_one_or_several(tmp_path):
    folder = write_tiny_llama(tmp_path)
    with slotline.pipeline(str(folder), backend="torch", device="cpu", kv_cache_tokens=1024, threads=1) as pipe:
        one, (same, other) = pipe.embed("a"), pipe.embed(["a", "b"])
    assert one == pytest.approx(same, abs=1e-5) and one != pytest.approx(other, abs=1e-3)
