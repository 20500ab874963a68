"""The OpenAPI document says what the server does: by its own code, and to a tool that tries to prove it wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import slotline
from slotline.apis.native.abort import AbortBody
from slotline.apis.native.bodies import InteractiveBody
from slotline.apis.native.tokens import DetokenizeBody, TokenizeBody
from slotline.apis.openai import create_app
from slotline.apis.openai.embeddings import EmbeddingBody
from slotline.apis.openai.models import IRRELEVANT, UNSUPPORTED, ChatBody, CompletionBody
from slotline.backend import HARD_PARAMS
from slotline.testing.tiny import write_tiny_llama

ECHO = slotline.EngineConfig(model="echo", backend="echo")
BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/chat/interactive": InteractiveBody,
    "/generate": InteractiveBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort": AbortBody,
}


@pytest.fixture(scope="module")
async def served(anyio_backend):
    async with slotline.Engine.open(config=ECHO) as engine:
        app = create_app(engine, served_model_name=["a", "b"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            yield app, client


@pytest.fixture
async def document(served):
    return (await served[1].get("/openapi.json")).json()


def properties(schema):
    """Return the names of the fields of a body, of all its kinds."""
    kinds = schema.get("anyOf", [schema])
    assert all(kind["additionalProperties"] is False for kind in kinds)
    return set().union(*(kind["properties"] for kind in kinds))


async def test_every_route_is_there_and_no_other(served, document):
    app, _ = served
    paths = {route.path.replace(":path}", "}") for route in app.router.routes}
    assert paths - {"/openapi.json", "/docs", "/docs/{file}"} == set(document["paths"])
    assert document["openapi"].startswith("3.0") and document["info"]["version"] == slotline.__version__


async def test_every_field_is_there_and_no_other(document):
    for path, body in BODIES.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        known = set(body.model_fields) | IRRELEVANT | set(UNSUPPORTED)
        refused = HARD_PARAMS - {"min_tokens", "ignore_eos", "stop_token_ids"} | {"adapter"}  # by the echo backend
        assert properties(schema) == known - refused, path
        assert all(kind.get("required", []) for kind in schema.get("anyOf", [schema]))


async def test_it_tells_of_this_engine(document, tmp_path):
    def fields(of):
        body = of["paths"]["/v1/completions"]["post"]["requestBody"]
        return body["content"]["application/json"]["schema"]["properties"]

    assert (
        fields(document)["model"]["enum"] == ["a", "b"]
        and fields(document)["stop_token_ids"]["items"]["maximum"] == 256
    )
    options = {"backend": "torch", "device": "cpu", "max_logprobs": 5, "kv_cache_tokens": 1024, "threads": 1}
    async with slotline.Engine.open(str(write_tiny_llama(tmp_path)), **options) as engine:
        app = create_app(engine, served_model_name="m")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            other = fields((await client.get("/openapi.json")).json())
    assert other["logprobs"]["maximum"] == 5 and "logit_bias" in other
    assert other["max_tokens"]["maximum"] == engine.max_model_len


async def test_examples_are_answered(served, document):
    """All of them, but for what the echo backend has not."""
    replies = {}
    for path in BODIES:
        example = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
        reply = await served[1].post(path, json=example)
        replies[path] = reply.json().get("error", {}).get("code", reply.status_code)
    others = {"/v1/embeddings": "unsupported_parameter"}
    assert replies == dict.fromkeys(BODIES, 200) | others


async def test_the_page_loads_nothing_from_elsewhere(served):
    _, client = served
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)
    assert len(links) == 4 and "openapi.json" in (await client.get("/docs/start.js")).text
    for link in links:
        found = await client.get("/" + link)
        assert found.status_code == 200 and len(found.content) > 100 and "http" not in link


@pytest.mark.parametrize(
    "path",
    ["/docs/swagger-ui.js.map", "/docs/..%2f..%2fpyproject.toml", "/docs/%2e%2e/x", "/docs//etc/passwd", "/docs/"],
)
async def test_the_page_has_no_other_files(served, path):
    reply = await served[1].get("/docs" + path)
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "not_found"


async def test_a_mounted_document_names_where_it_is(served):
    from starlette.applications import Starlette
    from starlette.routing import Mount

    app = Starlette(routes=[Mount("/llm", routes=served[0].router.routes)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert (await client.get("/llm/docs/start.js")).status_code == 200


class Server:
    """`slotline serve` with the echo backend."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0"]
        options = ["--max-slots", "8", "--max-model-len", "256"]
        self.process = subprocess.Popen(
            command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
        )
        self.url = re.search(r"http://\S+", self.process.stdout.readline())[0]

    def stop(self) -> str:
        self.process.terminate()
        _, said = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return said


def schemathesis(folder: Path, *options: str) -> None:
    """Let schemathesis try the server; it exits with 1 where it finds anything.

    Data that fits the schema may still be refused (min_tokens above max_tokens, a prompt beyond the context), which no
    JSON schema of OpenAPI 3.0 can say: hence the one check that is left out.
    """
    server = Server()
    try:
        # Without a terminal width of its own it would cut what it found.
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json", "--no-color"]
        checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        phases = ["--phases", "examples,coverage,fuzzing"]
        done = subprocess.run(
            [*command, *checks, *phases, *options], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "15 passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
    finally:
        said = server.stop()
    assert "Traceback" not in said


def test_schemathesis_finds_nothing(tmp_path):
    schemathesis(tmp_path, "--max-examples", "10", "--generation-deterministic")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_schemathesis_finds_nothing_though_it_looks_long(tmp_path):
    schemathesis(tmp_path, "--max-examples", "1000")
