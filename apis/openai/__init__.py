"""OpenAI's routes over an engine: ``create_app``, or ``routes`` inside an application that exists.

Importing this is cheap; the web framework comes with the first use of one of the names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slotline.hookspecs import hookimpl

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from slotline.apis.openai.app import create_app as create_app
    from slotline.apis.openai.app import engine_lifespan as engine_lifespan
    from slotline.apis.openai.app import routes as routes
    from slotline.apis.openai.service import Settings as Settings
    from slotline.engine import Engine

__all__ = ["Settings", "create_app", "engine_lifespan", "routes"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("slotline.apis.openai.app"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def slotline_register_apis(register: Callable[[str, Any], None]) -> None:
    """Register the OpenAI routes by name."""
    register("openai", _surface)


def _surface(engine: Engine) -> list[BaseRoute]:
    app = importlib.import_module("slotline.apis.openai.app")
    found: list[BaseRoute] = app.routes(engine)
    return found
