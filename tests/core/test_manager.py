"""The plugin manager: what it loads, what it refuses, what it hands out."""

import importlib.metadata
import io
import subprocess
import sys
import types

import pytest

from slotline import manager as module
from slotline.backend import BackendEntry
from slotline.errors import ConfigError, PluginError
from slotline.hookspecs import hookimpl
from slotline.manager import BUILTINS, KINDS, PluginManager


def make(**functions) -> types.ModuleType:
    """Make a plugin of hook implementations, as a module would be one."""
    plugin = types.ModuleType("made")
    for name, function in functions.items():
        setattr(plugin, name, hookimpl(specname=name)(function))
    return plugin


def templates(**entries):
    def register_all(register):
        for name, text in entries.items():
            register(name, text)

    return make(slotline_register_chat_templates=register_all)


def backends(*entries: BackendEntry):
    def register_all(register):
        for entry in entries:
            register(entry)

    return make(slotline_register_backends=register_all)


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(module, "BUILTINS", ())
    made = PluginManager("")
    yield made
    made.close()


class Installed:
    """Stands in for installed packages: entry points with a distribution behind each."""

    def __init__(self, monkeypatch) -> None:
        self.points: list[importlib.metadata.EntryPoint] = []
        monkeypatch.setattr(module, "entry_points", lambda group: [p for p in self.points if p.group == group])
        self._monkeypatch = monkeypatch

    def add(self, name: str, distribution: str, plugin: object = None, group: str = "slotline") -> None:
        package = f"installed_{len(self.points)}"
        if plugin is not None:
            self._monkeypatch.setitem(sys.modules, package, plugin)
        dist = types.SimpleNamespace(name=distribution, version="1.2")
        point = importlib.metadata.EntryPoint(name, package, group)
        vars(point).update(dist=dist)
        self.points.append(point)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(module, "BUILTINS", ())
    monkeypatch.delenv("SLOTLINE_PLUGINS", raising=False)
    return Installed(monkeypatch)


def names(made: PluginManager) -> list[str]:
    return [info.name for info in made.plugins()]


# Which plugins are loaded


def test_installed_packages_are_loaded_after_built_in_ones(installed, monkeypatch):
    monkeypatch.setattr(module, "BUILTINS", ("built_in_plugin",))
    monkeypatch.setitem(sys.modules, "built_in_plugin", templates(a="A"))
    installed.add("one", "dist-one", templates(b="B"))
    made = PluginManager()
    assert names(made) == ["built_in_plugin", "one"]
    first, second = made.plugins()
    assert first.distribution == "slotline" and (second.distribution, second.version) == ("dist-one", "1.2")
    assert second.hooks == ("slotline_register_chat_templates",)
    assert made.registry("chat_templates") == {"a": "A", "b": "B"}


@pytest.mark.parametrize(
    ("switch", "loaded"),
    [
        (None, ["one", "two", "three"]),
        ("", []),
        (" , ", []),
        ("two", ["two"]),
        ("Dist_One", ["one"]),
        ("three, one", ["three", "one"]),
        ("dist.two,two", ["two", "three"]),
    ],
)
def test_switch_chooses_outside_packages(installed, switch, loaded):
    for name, dist in (("one", "dist-one"), ("two", "dist-two"), ("three", "dist-two")):
        installed.add(name, dist, make())
    assert names(PluginManager(switch)) == loaded


def test_switch_comes_from_the_environment_unless_given(installed, monkeypatch):
    installed.add("one", "dist-one", make())
    monkeypatch.setenv("SLOTLINE_PLUGINS", "")
    assert names(PluginManager()) == []
    assert names(PluginManager("one")) == ["one"]


def test_unknown_package_is_refused_with_what_there_is(installed):
    installed.add("one", "dist-one", make())
    with pytest.raises(PluginError, match=r"no plugin 'onee' is installed; installed: one \(dist-one\)"):
        PluginManager("onee")


def test_other_groups_are_left_alone(installed):
    installed.add("one", "dist-one", make(), group="slotline.other")
    assert names(PluginManager()) == []


def test_built_in_plugins_load_lightly_and_fit():
    heavy = ["starlette", "tokenizers", "torch", "transformers", "triton", "uvicorn"]
    code = f"""
import sys
from slotline.manager import BUILTINS, PluginManager
made = PluginManager("")
assert [info.name for info in made.plugins()] == list(BUILTINS)
assert all(info.hooks for info in made.plugins()), made.plugins()
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


# What is refused


def test_failing_import_names_plugin_and_distribution(installed):
    installed.add("one", "dist-one")
    with pytest.raises(PluginError, match=r"plugin 'one' \(dist-one 1.2\) cannot be imported: ModuleNotFoundError"):
        PluginManager()


def test_wrong_argument_name_is_refused(installed):
    installed.add("one", "dist-one", make(slotline_register_backends=lambda regster: None))
    with pytest.raises(PluginError, match=r"plugin 'one' \(dist-one 1.2\) does not fit .*regster"):
        PluginManager()


def test_unknown_hook_is_refused(installed):
    installed.add("one", "dist-one", make(slotline_register_backend=lambda register: None))
    with pytest.raises(PluginError, match=r"plugin 'one' \(dist-one 1.2\) .*slotline_register_backend"):
        PluginManager()


def test_unmarked_hook_is_refused(manager):
    plugin = types.SimpleNamespace(slotline_register_backends=lambda register: None)
    with pytest.raises(PluginError, match="slotline_register_backends is not marked"):
        manager.register(plugin, "mine")


def test_async_hook_is_refused(manager):
    async def observe(event):
        pass

    with pytest.raises(PluginError, match="slotline_observe_request is async"):
        manager.register(make(slotline_observe_request=observe), "mine")


def test_hookspecs_imported_by_a_plugin_are_no_implementations(manager):
    from slotline.hookspecs import slotline_register_backends

    plugin = templates(a="A")
    plugin.slotline_register_backends = slotline_register_backends
    manager.register(plugin, "mine")
    assert manager.plugins()[0].hooks == ("slotline_register_chat_templates",)


def test_taken_plugin_name_is_refused(installed):
    installed.add("one", "dist-one", make())
    installed.add("one", "dist-two", make())
    with pytest.raises(PluginError, match=r"'one' \(dist-two 1.2\) is loaded already, as .*'one' \(dist-one 1.2\)"):
        PluginManager()


def test_same_plugin_twice_is_refused(manager):
    plugin = templates(a="A")
    manager.register(plugin, "one")
    with pytest.raises(PluginError, match="plugin 'two' is loaded already, as plugin 'one'"):
        manager.register(plugin, "two")


# What plugins registered


def test_registry_is_filled_once_and_only_when_asked_for(manager):
    calls = []
    manager.register(make(slotline_register_formats=lambda register: calls.append(register("s", 1))), "one")
    assert calls == []
    assert manager.registry("formats") == {"s": 1} == manager.registry("formats")
    assert len(calls) == 1


def test_registry_sees_a_plugin_registered_later(manager):
    assert manager.registry("chat_templates") == {}
    manager.register(templates(a="A"), "one")
    assert manager.registry("chat_templates") == {"a": "A"}


def test_every_kind_has_its_hook(manager):
    for kind in KINDS:
        assert manager.registry(kind) == {}
    hooks = {name for name in dir(manager.hook) if name.startswith("slotline_register_")}
    assert hooks == {f"slotline_register_{kind}" for kind in KINDS}


def test_unknown_kind_is_a_key_error_with_a_hint(manager):
    with pytest.raises(KeyError, match="did you mean 'formats'"):
        manager.registry("format")


def test_objects_go_by_their_own_names(manager):
    command = types.SimpleNamespace(name="serve")
    manager.register(make(slotline_register_commands=lambda register: register(command)), "one")
    manager.register(make(slotline_register_metrics=lambda register: (register(io.StringIO()), register(make))), "two")
    assert manager.registry("commands") == {"serve": command}
    assert set(manager.registry("metrics")) == {"StringIO", "make"}


def test_duplicate_names_both_plugins(manager):
    manager.register(templates(a="A"), "one")
    manager.register(templates(a="B"), "two")
    with pytest.raises(PluginError, match="plugin 'one' and plugin 'two' both register 'a' in chat_templates"):
        manager.registry("chat_templates")


def test_raising_hook_names_the_plugin(manager):
    manager.register(make(slotline_register_formats=lambda register: register("no object")), "one")
    with pytest.raises(PluginError, match="plugin 'one' failed in slotline_register_formats: TypeError"):
        manager.registry("formats")


def test_managers_do_not_share_anything(manager, monkeypatch):
    manager.register(templates(a="A"), "one")
    assert PluginManager("").registry("chat_templates") == {}


# Backends


def entry(name: str, priority: int | None = None, reason: str | None = None) -> BackendEntry:
    return BackendEntry(name=name, create=object, unavailable=lambda: reason, auto_priority=priority)


def test_backend_by_name(manager):
    manager.register(backends(entry("a"), entry("b")), "one")
    assert manager.backend("b").name == "b"


def test_auto_takes_the_best_that_can_run(manager):
    manager.register(backends(entry("never"), entry("slow", 1), entry("fast", 9, "no GPU"), entry("good", 5)), "one")
    assert manager.backend("auto").name == "good"


def test_auto_says_why_nothing_can_run(manager):
    with pytest.raises(ConfigError, match="none is installed"):
        manager.backend("auto")
    manager.register(backends(entry("fast", 9, "no GPU")), "one")
    with pytest.raises(ConfigError, match="fast: no GPU"):
        manager.backend("auto")


def test_unavailable_backend_says_why(manager):
    manager.register(backends(entry("fast", 9, "no GPU")), "one")
    with pytest.raises(ConfigError, match="backend 'fast' cannot run here: no GPU"):
        manager.backend("fast")


def test_unknown_backend_gets_a_hint(manager):
    manager.register(backends(entry("torch"), entry("echo")), "one")
    with pytest.raises(ConfigError, match=r"backend is 'trch'.*did you mean 'torch'.*known: echo, torch"):
        manager.backend("trch")


# Tracing and closing


def test_hook_calls_are_traced(monkeypatch):
    monkeypatch.setattr(module, "BUILTINS", ())
    stream = io.StringIO()
    made = PluginManager("", trace=stream)
    made.register(make(slotline_open_model=lambda config: f"model of {config}"), "mine")
    assert made.hook.slotline_open_model(config="c", manager=None) == "model of c"
    call, result = stream.getvalue().splitlines()
    assert call == "hook slotline_open_model(config='c', manager=None) in mine"
    assert result == "hook slotline_open_model -> 'model of c'"


def test_tracing_shows_what_a_hook_raised(monkeypatch):
    monkeypatch.setattr(module, "BUILTINS", ())
    stream = io.StringIO()
    made = PluginManager("", trace=stream)
    made.register(make(slotline_observe_request=lambda event: 1 / 0), "mine")
    with pytest.raises(ZeroDivisionError):
        made.hook.slotline_observe_request(event=None)
    assert "raised ZeroDivisionError" in stream.getvalue()


@pytest.mark.parametrize(("value", "traced"), [("1", True), ("0", False), ("", False)])
def test_tracing_is_switched_by_the_environment(monkeypatch, capsys, value, traced):
    monkeypatch.setattr(module, "BUILTINS", ())
    monkeypatch.setenv("SLOTLINE_TRACE_HOOKS", value)
    PluginManager("").hook.slotline_observe_request(event=None)
    assert ("hook slotline_observe_request(event=None) in no plugin" in capsys.readouterr().err) is traced


def test_close_unregisters_everything(manager):
    plugin = templates(a="A")
    manager.register(plugin, "one")
    manager.registry("chat_templates")
    manager.close()
    manager.close()
    assert manager.plugins() == [] and manager.registry("chat_templates") == {}
    manager.register(plugin, "one")


def test_built_in_plugins_are_distinct():
    assert len(set(BUILTINS)) == len(BUILTINS)
