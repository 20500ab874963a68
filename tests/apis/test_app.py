"""Applications around an engine: who opens it, what they say meanwhile, what plugins add."""

import importlib.util
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import slotline
from slotline.apis.openai import create_app, engine_lifespan, routes
from slotline.apis.openai.service import public_name
from slotline.errors import EngineClosed, ModelNotFound
from slotline.hookspecs import hookimpl
from slotline.manager import PluginManager

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
CONFIG = slotline.EngineConfig(model="echo", backend="echo")
TEXT = {"model": "echo", "prompt": "abc", "max_tokens": 3}


async def test_an_app_of_a_config_opens_and_closes_its_engine(fake):
    lifespan = engine_lifespan(CONFIG)
    app = create_app(lifespan)
    async with fake.client(app) as client:
        async with app.router.lifespan_context(app):
            reply = await client.post("/v1/completions", json=TEXT)
            assert reply.json()["choices"][0]["text"] == "abc"
            engine = lifespan.engine
        assert lifespan.engine is None and engine.health().status == "closed"
        assert (await client.get("/health")).status_code == 503


async def test_a_model_that_cannot_be_opened_fails_the_start():
    app = create_app(slotline.EngineConfig(model="/no/such/model", backend="torch"))
    with pytest.raises(ModelNotFound):
        async with app.router.lifespan_context(app):
            pass


async def test_an_app_of_an_engine_does_not_own_it(fake):
    async with slotline.Engine.open(config=CONFIG) as engine:
        app = create_app(engine)
        async with fake.client(app) as client, app.router.lifespan_context(app):
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "echo"
        assert engine.health().ok


class Opening:
    """An Engine class whose open() waits, then succeeds or raises."""

    def __init__(self, engine):
        self.engine = engine
        self.go_on = anyio.Event()

    @asynccontextmanager
    async def open(self, config):
        await self.go_on.wait()
        if isinstance(self.engine, Exception):
            raise self.engine
        yield self.engine


async def test_health_while_loading_in_the_background(fake, monkeypatch):
    async with slotline.Engine.open(config=CONFIG) as engine:
        opening = Opening(engine)
        monkeypatch.setattr("slotline.apis.openai.service.Engine", opening)
        lifespan, opened = engine_lifespan(CONFIG, background=True), anyio.Event()
        lifespan.on_open.append(lambda _: opened.set())
        app = create_app(lifespan)
        async with fake.client(app) as client, lifespan(app):
            reply = await client.get("/health")
            assert reply.status_code == 503 and reply.json()["status"] == "loading"
            reply = await client.post("/v1/completions", json=TEXT)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "loading"
            assert "retry-after" in reply.headers
            opening.go_on.set()
            await opened.wait()
            assert (await client.get("/health")).json() == {"status": "ok", "detail": ""}


async def test_a_failure_in_the_background_is_told(fake, monkeypatch):
    opening = Opening(ModelNotFound("no such model at /secret"))
    opening.go_on.set()
    monkeypatch.setattr("slotline.apis.openai.service.Engine", opening)
    told, failed = [], anyio.Event()
    lifespan = engine_lifespan(CONFIG, background=True, on_failure=lambda e: (told.append(e), failed.set()))
    async with fake.client(create_app(lifespan)) as client, lifespan():
        await failed.wait()
        reply = await client.get("/health")
    assert reply.status_code == 503 and reply.json()["status"] == "unhealthy" and "secret" not in reply.text
    assert isinstance(told[0], ModelNotFound)


async def test_an_engine_that_breaks_for_good_is_told(monkeypatch):
    monkeypatch.setattr("slotline.apis.openai.service.HEALTH_PERIOD", 0)
    failed = anyio.Event()
    lifespan = engine_lifespan(CONFIG, background=True, on_failure=lambda e: failed.set())
    opened = anyio.Event()
    lifespan.on_open.append(lambda engine: opened.set())
    async with lifespan():
        await opened.wait()
        monkeypatch.setattr(lifespan.engine, "health", lambda: slotline.Health("unhealthy", "the device is lost"))
        await failed.wait()
    assert "the device is lost" in str(lifespan.failure)


async def test_a_closed_engine_answers_503(fake):
    async with slotline.Engine.open(config=CONFIG) as engine:
        app = create_app(engine)
    async with fake.client(app) as client:
        reply = await client.post("/v1/completions", json=TEXT)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == EngineClosed.code
        assert (await client.get("/health")).json()["status"] == "closed"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/model", "org/model"),
        ("smollm2-135m", "smollm2-135m"),
        ("/a/b/model/", "model"),
        ("./model.gguf", "model.gguf"),
        ("~/model", "model"),
        (r"C:\models\m", "m"),
        ("..", "model"),
    ],
)
def test_a_path_is_not_published(name, shown):
    assert public_name(name) == shown


@pytest.mark.usefixtures("no_blocking")
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_blocks_the_loop(fake, stream):
    async with slotline.Engine.open(config=CONFIG) as engine, fake.client(create_app(engine)) as client:
        for path, body in (("completions", TEXT), ("chat/completions", {"model": "echo", "messages": "abc"})):
            reply = await client.post(f"/v1/{path}", json={**body, "stream": stream})
            assert reply.status_code == 200 and "error" not in reply.text


# Hooks


async def test_hook_slotline_register_apis(fake):
    class Plugin:
        @hookimpl
        def slotline_register_apis(self, register):
            register("hello", lambda engine: [Route("/hello", lambda _: PlainTextResponse(engine.model.name))])

    async with slotline.Engine.open(config=CONFIG) as engine:
        assert "/v1/completions" in [r.path for r in engine.manager.registry("apis")["openai"](engine)]
        engine.manager.register(Plugin(), "hello")
        async with fake.client(create_app(engine)) as client:
            assert (await client.get("/hello")).text == "echo"
            assert (await client.get("/v1/models")).status_code == 200


async def test_hook_slotline_register_metrics(fake):
    async with slotline.Engine.open(config=CONFIG) as engine, fake.client(create_app(engine)) as client:
        await client.post("/v1/completions", json=TEXT)
        reply = await client.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert reply.headers["content-type"].startswith("text/plain")
    value = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in families.values()
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert value["slotline:prompt_tokens_total", None] == 3
    assert value["slotline:generation_tokens_total", None] >= 3
    assert value["slotline:requests_finished_total", "length"] == 1
    assert value["slotline:num_requests_running", None] == 0
    assert value["slotline:time_to_first_token_seconds_count", None] == 1
    assert all(family.documentation for family in families.values())


def test_each_engine_has_metrics_of_its_own():
    one, two = (PluginManager("").registry("metrics")["prometheus"] for _ in range(2))
    assert one is not two


async def test_without_a_sink_there_are_no_metrics(fake):
    async with fake.client(create_app(fake.Engine())) as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 404 and "error" in reply.json()


# Examples


async def test_the_mounted_example(fake, monkeypatch):
    monkeypatch.setenv("SLOTLINE_MODEL", "echo")
    monkeypatch.setenv("SLOTLINE_BACKEND", "echo")
    spec = importlib.util.spec_from_file_location("mounted_app", EXAMPLES / "mounted_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    async with fake.client(module.app) as client, module.app.router.lifespan_context(module.app):
        assert (await client.get("/")).json() == {"the sea is": "The sea is"}
        assert (await client.post("/llm/v1/completions", json=TEXT)).json()["choices"][0]["text"] == "abc"
        assert (await client.get("/v1/models")).status_code == 404


def test_the_embedding_example():
    command = [sys.executable, "-P", EXAMPLES / "embed_async.py", "echo", "echo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'The sea is' -> 'The sea is'" in done.stdout and "chat -> 'Say hell'" in done.stdout


async def test_routes_under_a_host_leave_its_pages_alone(fake):
    async with slotline.Engine.open(config=CONFIG) as engine:
        host = Starlette(
            routes=[Route("/health", lambda _: PlainTextResponse("mine")), Mount("/llm", routes=routes(engine))]
        )
        async with fake.client(host) as client:
            assert (await client.get("/health")).text == "mine"
            assert (await client.get("/llm/health")).json()["status"] == "ok"
            assert (await client.head("/llm/health")).status_code == 200
