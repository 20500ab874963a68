"""Every hook is documented, tested and used by a built-in plugin; and each does what its page says."""

import ast
import dataclasses
import inspect
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

import slotline
from slotline import hookspecs, manager
from slotline.backend import BackendEntry
from slotline.hookspecs import hookimpl
from slotline.manager import BUILTINS, KINDS, PluginManager

pytest_plugins = ["slotline.testing"]

REPO = Path(__file__).resolve().parents[1]
HOOKS = {
    name: list(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if hasattr(function, f"{hookspecs.PROJECT}_spec")
}


def documented() -> dict[str, list[str]]:
    """Return the hooks that docs/hooks.md has a heading for, with their arguments."""
    page = (REPO / "docs" / "hooks.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (slotline_\w+)\((.*)\)$", page, re.MULTILINE)
    assert len({name for name, _ in headings}) == len(headings)
    return {name: [a.strip() for a in arguments.split(",")] for name, arguments in headings}


def functions_in_tests() -> set[str]:
    """Return the names of all functions in test modules."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (REPO / "tests").rglob("test_*.py"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, functions)}


# About all hooks


def test_there_are_hooks():
    assert len(HOOKS) >= 10 and all(name.startswith("slotline_") for name in HOOKS)


def test_every_hook_is_documented_with_its_arguments():
    assert documented() == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test(hook):
    assert f"test_hook_{hook.removeprefix('slotline_')}" in functions_in_tests()


def test_every_hook_has_a_docstring():
    assert all(inspect.getdoc(getattr(hookspecs, name)) for name in HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used_by_a_built_in_plugin(hook):
    made = PluginManager("")
    used = {name for info in made.plugins() for name in info.hooks}
    made.close()
    assert hook in used


def test_every_register_hook_is_a_kind():
    assert {f"slotline_register_{kind}" for kind in KINDS} == {n for n in HOOKS if n.startswith("slotline_register_")}


# Each hook, through the engine or surface that calls it


@pytest.fixture
def plugin(monkeypatch):
    """Return a function that adds a plugin of hook implementations to those that every engine loads."""

    def add(**functions) -> None:
        module = types.ModuleType("plugin_of_a_test")
        for name, function in functions.items():
            setattr(module, name, hookimpl(specname=name)(function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(manager, "BUILTINS", (*BUILTINS, module.__name__))

    return add


def greedy(**fields) -> slotline.SamplingParams:
    return slotline.SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields})


async def test_hook_register_backends(plugin):
    from slotline.plugins.echo import EchoBackend, open_model

    entry = BackendEntry(name="parrot", create=EchoBackend, open_model=open_model)
    plugin(slotline_register_backends=lambda register: register(entry))
    async with slotline.Engine.open("any", backend="parrot") as engine:
        assert (await engine.generate("hello")).text == "hello"


async def test_hook_open_model(plugin):
    from slotline.plugins import echo

    def open_mine(config):
        return echo.open_model(config) if config.model.startswith("mine:") else None

    entry = BackendEntry(name="bare", create=echo.EchoBackend)
    plugin(slotline_register_backends=lambda register: register(entry), slotline_open_model=open_mine)
    async with slotline.Engine.open("mine:1", backend="bare") as engine:
        assert engine.model.name == "mine:1"
    with pytest.raises(slotline.SlotlineError, match="yours:1"):
        async with slotline.Engine.open("yours:1", backend="bare"):
            pass


async def test_hook_register_model_sources(plugin, tiny_llama):
    from slotline.plugins.models.sources import Located

    class Shelf:
        def resolve(self, name, config, progress):
            return Located(tiny_llama, "the shelf") if name == "shelf:tiny" else None

    plugin(slotline_register_model_sources=lambda register: register("shelf", Shelf()))
    async with slotline.Engine.open("shelf:tiny", backend="torch", device="cpu", kv_cache_tokens=512) as engine:
        assert engine.model.source == "the shelf"
        assert len((await engine.generate("the fox", greedy())).token_ids) == 4


async def test_hook_register_formats(plugin, tiny_llama, tmp_path):
    from slotline.plugins.models.hf_format import SafetensorsFormat

    class Pointer(SafetensorsFormat):
        """A file with the name of a folder in it."""

        def recognises(self, path):
            return path.suffix == ".pointer"

        def open(self, path, config, architectures):
            return super().open(Path(path.read_text()), config, architectures)

    plugin(slotline_register_formats=lambda register: register("pointer", Pointer()))
    file = tmp_path / "model.pointer"
    file.write_text(str(tiny_llama))
    async with slotline.Engine.open(str(file), backend="torch", device="cpu", kv_cache_tokens=512) as engine:
        assert len((await engine.generate("the fox", greedy())).token_ids) == 4


async def test_hook_register_architectures(plugin, tiny_llama, tmp_path):
    from slotline.plugins.models.architectures import LLAMA

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "AlpacaForCausalLM"))
    alpaca = dataclasses.replace(LLAMA, name="alpaca", hf_names=("AlpacaForCausalLM",), gguf_names=())
    plugin(slotline_register_architectures=lambda register: register("alpaca", alpaca))
    async with slotline.Engine.open(str(folder), backend="torch", device="cpu", kv_cache_tokens=512) as engine:
        assert len((await engine.generate("the fox", greedy())).token_ids) == 4


async def test_hook_register_chat_templates(plugin, tiny_llama):
    text = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"
    plugin(slotline_register_chat_templates=lambda register: register("shout", text))
    options = {"backend": "torch", "device": "cpu", "kv_cache_tokens": 512, "chat_template": "shout"}
    async with slotline.Engine.open(str(tiny_llama), **options) as engine:
        assert engine.decode(await engine.chat_prompt([{"role": "user", "content": "fox"}])) == "FOX!"


async def test_hook_register_logits_processors(plugin, tiny_llama):
    class Only:
        """Allow a single token."""

        graph_safe = False

        def __init__(self, info):
            self.tokens = {}

        def add(self, row, args):
            self.tokens[row] = args["token"]

        def remove(self, row):
            del self.tokens[row]

        def apply(self, logits, rows):
            for line, row in enumerate(rows.tolist()):
                kept = logits[line, self.tokens[row]].item()
                logits[line] = float("-inf")
                logits[line, self.tokens[row]] = kept

    plugin(slotline_register_logits_processors=lambda register: register("only", Only))
    async with slotline.Engine.open(str(tiny_llama), backend="torch", device="cpu", kv_cache_tokens=512) as engine:
        assert "only" in engine.capabilities.processors
        forced = await engine.generate("the fox", greedy(extra={"only": {"token": 42}}))
        free = await engine.generate("the fox", greedy())
    assert forced.token_ids == [42] * 4 != free.token_ids


async def test_hook_register_apis(plugin):
    from httpx import ASGITransport, AsyncClient
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from slotline.apis.openai import create_app

    def surface(engine):
        async def say(request):
            done = await engine.generate(request.path_params["word"])
            return PlainTextResponse(done.text)

        return [Route("/say/{word}", say)]

    plugin(slotline_register_apis=lambda register: register("say", surface))
    async with slotline.Engine.open("echo", backend="echo") as engine:
        transport = ASGITransport(create_app(engine))
        async with AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/say/hello")).text == "hello"


def test_hook_register_commands(plugin):
    import click
    from click.testing import CliRunner

    from slotline.apis.cli.commandline import cli

    @click.command("greet")
    @click.argument("name")
    def greet(name: str) -> None:
        """Greet somebody."""
        click.echo(f"hello {name}")

    plugin(slotline_register_commands=lambda register: register(greet))
    assert CliRunner().invoke(cli, ["greet", "you"]).output == "hello you\n"
    assert "Greet somebody." in CliRunner().invoke(cli, ["--help"]).output


async def test_hook_register_metrics(plugin, monkeypatch):
    from httpx import ASGITransport, AsyncClient

    from slotline.apis.openai import create_app

    class Sink:
        name = "plain"
        content_type = "text/plain"

        def render(self, stats, model):
            return f"{model} generated {stats.generated_tokens}".encode()

    plugin(slotline_register_metrics=lambda register: register(Sink()))
    without = tuple(name for name in manager.BUILTINS if not name.endswith(".prometheus"))
    monkeypatch.setattr(manager, "BUILTINS", without)
    async with slotline.Engine.open("echo", backend="echo") as engine:
        await engine.generate("hello", slotline.SamplingParams(max_tokens=3))
        transport = ASGITransport(create_app(engine, served_model_name="parrot"))
        async with AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/metrics")).text == "parrot generated 3"


async def test_hook_observe_request(plugin):
    seen = []
    plugin(slotline_observe_request=lambda event: seen.append(event))
    async with slotline.Engine.open("echo", backend="echo") as engine:
        params = slotline.SamplingParams(max_tokens=3)
        await engine.generate("hello", params, request_id="r", client="c")
        handle = await engine.submit(["hello"], slotline.SamplingParams(max_tokens=1000, ignore_eos=True))
        handle.abort()
    assert [event.kind for event in seen] == ["admitted", "first_token", "finished", "admitted", "finished"]
    last = seen[2]
    assert (last.request_id, last.client, last.finish_reason) == ("r", "c", "length")
    assert (last.prompt_tokens, last.completion_tokens, last.error) == (5, 3, None)
    assert seen[4].finish_reason == "abort"
    assert seen[0].time <= seen[1].time <= seen[2].time


async def test_requests_are_logged(caplog):
    caplog.set_level("DEBUG", "slotline.requests")
    async with slotline.Engine.open("echo", backend="echo") as engine:
        await engine.generate("hello", slotline.SamplingParams(max_tokens=3), request_id="r", client="c")
    lines = [record.getMessage() for record in caplog.records if record.name == "slotline.requests"]
    assert lines[0] == "r of 'c': admitted, 5 prompt and 0 answer tokens"
    assert lines[1].startswith("r of 'c': first token, 5 prompt and 1 answer tokens")
    assert lines[2] == "r of 'c': finished (length), 5 prompt and 3 answer tokens"
    assert "hello" not in caplog.text
