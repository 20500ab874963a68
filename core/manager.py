"""The plugin manager of one engine: which plugins there are, and what they registered.

Built-in plugins come first, then installed packages that have entry points in the group
``slotline``. Nothing here is global: two engines in a process have a manager each.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TextIO

import pluggy

import slotline
from slotline import hookspecs
from slotline.errors import ConfigError, PluginError, SlotlineError

if TYPE_CHECKING:
    from slotline.backend import BackendEntry

GROUP = "slotline"
PLUGINS_VARIABLE = "SLOTLINE_PLUGINS"
TRACE_VARIABLE = "SLOTLINE_TRACE_HOOKS"

# Each registers through the same hooks as an outside package. Importing one must stay cheap: no
# torch, no web framework until something of it is used.
BUILTINS: tuple[str, ...] = (
    "slotline.plugins.echo",
    "slotline.plugins.torch_backend",
    "slotline.plugins.triton_backend",
    "slotline.plugins.models",
    "slotline.plugins.processors",
    "slotline.plugins.prometheus",
    "slotline.plugins.request_log",
    "slotline.plugins.opentelemetry",
    "slotline.apis.openai",
    "slotline.apis.cli",
)

KINDS = (
    "backends",
    "model_sources",
    "formats",
    "architectures",
    "chat_templates",
    "logits_processors",
    "apis",
    "commands",
    "metrics",
)
NAME_THEMSELVES = frozenset({"backends", "commands", "metrics"})  # registered without a name beside the object


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One loaded plugin, as ``slotline plugins`` prints it."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]


class PluginManager:
    """Load plugins and hand out what they registered.

    ::

        manager = PluginManager()                  # built-ins and all installed packages
        manager.registry("chat_templates")         # {"chatml": "...", ...}
        manager.backend("auto")                    # the BackendEntry to use here
        manager.hook.slotline_open_model(config=config, manager=manager)

    Args:
        plugins: which outside packages to load, by distribution or entry point: "" = none,
            "a,b" = these, None = what ``SLOTLINE_PLUGINS`` says, or all where it is unset.
        trace: print every hook call here; ``SLOTLINE_TRACE_HOOKS=1`` prints to stderr.

    Raises:
        PluginError: a plugin is unknown, cannot be imported, or does not fit the hooks.
    """

    def __init__(self, plugins: str | None = None, trace: TextIO | None = None) -> None:
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._origin: dict[str, tuple[str, str]] = {}  # plugin name -> distribution and version
        self._registries: dict[str, dict[str, Any]] = {}
        if trace is None and os.environ.get(TRACE_VARIABLE, "0") not in ("", "0"):
            trace = sys.stderr
        if trace is not None:
            self._pm.add_hookcall_monitoring(*_tracers(trace))
        if plugins is None:
            plugins = os.environ.get(PLUGINS_VARIABLE)
        for name in BUILTINS:
            self._add(name, partial(importlib.import_module, name), "slotline", slotline.__version__)
        for point in _chosen(list(entry_points(group=GROUP)), plugins):
            self._add(point.name, point.load, *_origin_of(point))
        self._check_pending()

    @property
    def hook(self) -> Any:
        """Return the relay through which hooks are called, by keyword."""
        return self._pm.hook

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin that is not a package: a module, or any object with hook implementations.

        Raises:
            PluginError: it does not fit the hooks, or the name is taken.
        """
        self._add(name, lambda: plugin, "", "")
        self._check_pending()
        self._registries.clear()

    def plugins(self) -> list[PluginInfo]:
        """Return the loaded plugins in loading order, built-in ones first."""
        return [
            PluginInfo(name, *self._origin[name], tuple(sorted(c.name for c in self._pm.get_hookcallers(plugin) or ())))
            for name, plugin in self._pm.list_name_plugin()
        ]

    def registry(self, kind: str) -> Mapping[str, Any]:
        """Return all that plugins registered through ``slotline_register_<kind>``, by name.

        The hook is called once, when this is first asked for.

        Raises:
            PluginError: two plugins registered the same name, or one raised.
        """
        if kind not in self._registries:
            if kind not in KINDS:
                raise KeyError(f"{kind!r} is not a kind of plugin{_closest(kind, KINDS)}")
            self._registries[kind] = self._collect(kind)
        return self._registries[kind]

    def backend(self, name: str) -> BackendEntry:
        """Return the backend of that name; "auto" is the best one that can run here.

        Raises:
            ConfigError: it is unknown or cannot run here, and why.
        """
        return self.backends(name)[0]

    def backends(self, name: str) -> list[BackendEntry]:
        """Return what may be tried for that name, the best first: one, or for "auto" all that can run here.

        Raises:
            ConfigError: there is none, and why.
        """
        entries: Mapping[str, BackendEntry] = self.registry("backends")
        if name == "auto":
            return _runnable(entries.values())
        if name not in entries:
            raise ConfigError(f"backend is {name!r}; there is no such backend{_closest(name, entries)}")
        if reason := entries[name].unavailable():
            raise ConfigError(f"backend {name!r} cannot run here: {reason}")
        return [entries[name]]

    def close(self) -> None:
        """Unregister every plugin; idempotent."""
        for name, _ in self._pm.list_name_plugin():
            self._pm.unregister(name=name)
        self._registries.clear()

    def _add(self, name: str, load: Callable[[], object], distribution: str, version: str) -> None:
        label = _label(name, distribution, version)
        try:
            plugin = load()
        except Exception as error:
            raise PluginError(f"{label} cannot be imported: {type(error).__name__}: {error}") from error
        _check_functions(plugin, label)
        try:
            self._pm.register(plugin, name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{label} does not fit the hooks: {_one_line(error)}") from error
        except ValueError as error:
            other = self._pm.get_name(plugin) or name
            raise PluginError(f"{label} is loaded already, as {self._label_of(other)}") from error
        self._origin[name] = distribution, version

    def _label_of(self, name: str) -> str:
        return _label(name, *self._origin[name])

    def _check_pending(self) -> None:
        try:
            self._pm.check_pending()
        except pluggy.PluginValidationError as error:
            label = self._label_of(self._pm.get_name(error.plugin) or "")
            raise PluginError(f"{label} implements a hook that does not exist: {_one_line(error)}") from error

    def _collect(self, kind: str) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        owners: dict[str, str] = {}
        for owner, plugin in self._pm.list_name_plugin():
            for name, item in self._ask(kind, owner, plugin):
                if name in entries:
                    labels = " and ".join(self._label_of(each) for each in (owners[name], owner))
                    raise PluginError(f"{labels} both register {name!r} in {kind}")
                entries[name], owners[name] = item, owner
        return entries

    def _ask(self, kind: str, owner: str, plugin: object) -> list[tuple[str, Any]]:
        """Call the hook for one plugin alone, so that each item has a known owner."""
        hook = f"slotline_register_{kind}"
        items: list[tuple[str, Any]] = []

        def register_named(name: str, item: Any) -> None:
            items.append((name, item))

        def register_one(item: Any) -> None:
            items.append((_name_of(item), item))

        others = [other for _, other in self._pm.list_name_plugin() if other is not plugin]
        caller = self._pm.subset_hook_caller(hook, others)
        if not caller.get_hookimpls():
            return []
        try:
            caller(register=register_one if kind in NAME_THEMSELVES else register_named)
        except SlotlineError:
            raise
        except Exception as error:
            raise PluginError(f"{self._label_of(owner)} failed in {hook}: {type(error).__name__}: {error}") from error
        return items


def _chosen(points: Sequence[EntryPoint], plugins: str | None) -> list[EntryPoint]:
    """Return the entry points that the switch names; all of them where it is None."""
    if plugins is None:
        return list(points)
    wanted = [name.strip() for name in plugins.split(",") if name.strip()]
    chosen: list[EntryPoint] = []
    for name in wanted:
        found = [p for p in points if name == p.name or _normal(name) == _normal(_origin_of(p)[0])]
        if not found:
            there = sorted({f"{p.name} ({_origin_of(p)[0]})" for p in points})
            raise PluginError(f"no plugin {name!r} is installed; installed: {', '.join(there) or 'none'}")
        chosen += [p for p in found if p not in chosen]
    return chosen


def _origin_of(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("", "")


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _runnable(entries: Iterable[BackendEntry]) -> list[BackendEntry]:
    found, reasons = [], []
    for entry in sorted(entries, key=lambda e: e.auto_priority or 0, reverse=True):
        if entry.auto_priority is None:
            continue
        reason = entry.unavailable()
        if reason:
            reasons.append(f"{entry.name}: {reason}")
        else:
            found.append(entry)
    if found:
        return found
    raise ConfigError(f"no backend can run here ({'; '.join(reasons) or 'none is installed'}); name one with backend")


def _check_functions(plugin: object, label: str) -> None:
    """Refuse what pluggy would accept without a word and never call, or call without effect."""
    for name in dir(plugin):
        function = inspect.getattr_static(plugin, name)
        marked = hasattr(function, f"{hookspecs.PROJECT}_impl")
        if marked and inspect.iscoroutinefunction(function):
            raise PluginError(f"{label} does not fit the hooks: {name} is async; a hook is a plain function")
        is_hook = inspect.isfunction(getattr(hookspecs, name, None)) and name.startswith("slotline_")
        if is_hook and callable(function) and not marked and function is not getattr(hookspecs, name):
            raise PluginError(f"{label} does not fit the hooks: {name} is not marked with @hookimpl")


def _name_of(item: object) -> str:
    """Return the name that a registered object goes by: its own, or its type's."""
    name = getattr(item, "name", None) or getattr(item, "__name__", None)
    return name if isinstance(name, str) else type(item).__name__


def _label(name: str, distribution: str, version: str) -> str:
    return f"plugin {name!r} ({distribution} {version})" if distribution else f"plugin {name!r}"


def _closest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {match[0]!r}?" if match else ""
    return f"{hint}; known: {', '.join(names) or 'none'}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tracers(stream: TextIO) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what pluggy calls before and after each hook call."""

    def before(hook: str, methods: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in arguments.items())
        callees = ", ".join(method.plugin_name for method in reversed(methods))
        print(f"hook {hook}({shown}) in {callees or 'no plugin'}", file=stream)

    def after(outcome: pluggy.Result[Any], hook: str, methods: object, arguments: object) -> None:
        error = outcome.exception
        what = f"raised {error!r}" if error is not None else f"-> {reprlib.repr(outcome.get_result())}"
        print(f"hook {hook} {what}", file=stream)

    return before, after
