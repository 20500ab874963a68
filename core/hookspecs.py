"""The hooks: one function each, a table of contents of what plugins can add.

All of them run at start-up or once a request, never per token: they hand over objects, and the
engine calls methods. Arguments may be left out by an implementation, not renamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from slotline.backend import BackendEntry
    from slotline.config import EngineConfig
    from slotline.manager import PluginManager
    from slotline.model import Model
    from slotline.request import RequestEvent

PROJECT = "slotline"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def slotline_register_backends(register: Callable[[BackendEntry], None]) -> None:
    """Register backends by name. Called once, when an engine or command first needs one."""


@hookspec(firstresult=True)
def slotline_open_model(config: EngineConfig, manager: PluginManager) -> Model | None:
    """Open the model named by config.model, without weights on a device. None = not mine."""
    return None


@hookspec
def slotline_register_model_sources(register: Callable[[str, Any], None]) -> None:
    """Register (name, source): a source turns a model name into a local folder or file."""


@hookspec
def slotline_register_formats(register: Callable[[str, Any], None]) -> None:
    """Register (name, format): a format opens a local folder or file as a checkpoint."""


@hookspec
def slotline_register_architectures(register: Callable[[str, Any], None]) -> None:
    """Register (name, architecture): how a checkpoint's config and tensor names map to a decoder."""


@hookspec
def slotline_register_chat_templates(register: Callable[[str, str], None]) -> None:
    """Register (name, jinja text) for models that ship no template and for --chat-template NAME."""


@hookspec
def slotline_register_logits_processors(register: Callable[[str, Any], None]) -> None:
    """Register (name, factory); SamplingParams.extra[name] selects it, on backends that can."""


@hookspec
def slotline_register_apis(register: Callable[[str, Any], None]) -> None:
    """Register (name, surface): a surface returns Starlette routes for an engine."""


@hookspec
def slotline_register_commands(register: Callable[[Any], None]) -> None:
    """Register click commands of the ``slotline`` command line."""


@hookspec
def slotline_register_metrics(register: Callable[[Any], None]) -> None:
    """Register metrics sinks; each gets the engine's statistics when asked for them."""


@hookspec
def slotline_observe_request(event: RequestEvent) -> None:
    """See a request admitted, give its first token, or finish. Called at those moments only."""
