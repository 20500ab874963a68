"""API keys: every route is behind them but those of health, and nothing says what they are."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

import slotline
from slotline.apis.openai import create_app
from slotline.apis.openai.keys import ApiKey, ApiKeys, RequireKey
from slotline.apis.openai.middleware import Frame
from slotline.errors import ConfigError

KEYS = ApiKeys([ApiKey.of("k-one", "team-a"), ApiKey.of("k-two", "team-b"), ApiKey.of("k-three")])
TEXT = {"model": "echo", "prompt": "abc", "max_tokens": 3}


def client_of(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def engine():
    async with slotline.Engine.open("echo", backend="echo", max_queue_per_client=1) as engine:
        yield engine


async def test_every_route_but_health_needs_a_key(engine):
    app = create_app(engine)
    paths = {route.path.replace("{model:path}", "echo") for route in app.router.routes if isinstance(route, Route)}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/health"} <= paths
    open_paths = {"/health", "/health/live", "/health/ready"}
    async with client_of(RequireKey(app, KEYS)) as client:
        for path in sorted(paths):
            for headers in ({}, bearer("k-on"), bearer("k-one "[:-2]), {"authorization": "Basic k-one"}, bearer("")):
                for method in ("GET", "POST", "OPTIONS"):
                    reply = await client.request(method, path, headers=headers)
                    if path in open_paths:
                        assert reply.status_code != 401
                        continue
                    assert reply.status_code == 401, (method, path, headers)
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.json()["error"]["code"] == "invalid_api_key"
            reply = await client.get(path, headers=bearer("k-two"))
            assert reply.status_code != 401


@pytest.mark.parametrize(
    "path", ["/V1/models", "//v1/models", "/v1/models/", "/v1/../v1/models", "/health/../v1/models", "/health/"]
)
async def test_spelling_a_path_another_way_is_no_way_round(engine, path):
    async with client_of(RequireKey(create_app(engine), KEYS)) as client:
        assert (await client.get(path)).status_code == 401


async def test_shares_of_the_queue_go_by_key(engine):
    long = {"model": "echo", "prompt": "abc", "max_tokens": 3, "n": 2}
    async with client_of(RequireKey(create_app(engine), KEYS)) as client:
        reply = await client.post("/v1/completions", json=long, headers=bearer("k-one"))
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        assert "team-a" in reply.json()["error"]["message"] and "k-one" not in reply.text
        reply = await client.post("/v1/completions", json=TEXT, headers=bearer("k-two"))
        assert reply.status_code == 200


async def test_keys_are_in_no_log(engine, caplog):
    caplog.set_level(logging.DEBUG)
    async with client_of(Frame(RequireKey(create_app(engine), KEYS))) as client:
        for key in ("k-one", "k-three", "k-wrong"):
            await client.post("/v1/completions", json=TEXT, headers=bearer(key))
    lines = [record.fields for record in caplog.records if record.name == "slotline.access"]
    assert [line["client"] for line in lines][:2] == ["team-a", ApiKey.of("k-three").name]
    assert not any(key in caplog.text or key in str(lines) for key in ("k-one", "k-three", "k-wrong"))


def test_all_keys_are_compared_whichever_matches(monkeypatch):
    seen = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (seen.append(len(a) == len(b)), compare(a, b))[1])
    for given, holder in (("k-one", "team-a"), ("k-three", ApiKey.of("k-three").name), ("x", None), ("", None)):
        seen.clear()
        assert KEYS.holder(given) == holder and seen == [True] * 3


def test_a_file_of_keys(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nteam-a k-one\n  k-two  \n")
    keys = ApiKeys.from_sources(str(file), {"SLOTLINE_API_KEY": "k-env"})
    assert len(keys) == 3 and keys.holder("k-one") == "team-a"
    assert keys.holder("k-two") and keys.holder("k-env") and not keys.holder("team-a")
    assert len(ApiKeys.from_sources(None, {})) == 0


@pytest.mark.parametrize("text", ["", "# none\n", "a b c\n", "a k-one\na k-two\n", "k\nk\n", b"\xff\xfe"])
def test_a_file_that_is_no_file_of_keys_is_refused(tmp_path: Path, text):
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="API key file"):
        ApiKeys.from_sources(str(file), {})
