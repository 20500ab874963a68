"""Routes and the application: mounted into a host, or on their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import slotline
from slotline.apis.native import native_routes
from slotline.apis.openai.document import document
from slotline.apis.openai.embeddings import Embeddings
from slotline.apis.openai.endpoint import ChatCompletions, Completions
from slotline.apis.openai.errors import (
    JSON_TYPE,
    ApiError,
    model_not_found,
    not_found,
    send_bytes,
    send_error,
    send_json,
    to_api_error,
    to_json,
    wrong_method,
)
from slotline.apis.openai.service import EngineLifespan, Service, Settings, logprob_cap, names_of
from slotline.apis.openai.swagger import Swagger
from slotline.config import EngineConfig
from slotline.engine import Engine, Health

engine_lifespan = EngineLifespan  # the name under which hosts know it


def create_app(
    engine: Engine | EngineConfig | EngineLifespan,
    *,
    served_model_name: str | Sequence[str] | None = None,
    settings: Settings | None = None,
) -> Starlette:
    """Build an application that serves one engine.

    Args:
        engine: an open engine, which stays its owner's; or a config (or a lifespan made of one), of
            which the application opens an engine when it starts and closes it when it ends.
        served_model_name: the names that requests may use; by default the model's own.
        settings: further options of the HTTP surface.
    """
    source = EngineLifespan(engine) if isinstance(engine, EngineConfig) else engine
    service = Service(source, _settings(settings, served_model_name))
    app = Starlette(
        routes=_routes(service),
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        lifespan=source if isinstance(source, EngineLifespan) else None,
    )
    app.router.redirect_slashes = False  # a redirect is no error envelope, and clients drop the body
    if isinstance(source, EngineLifespan):
        source.on_open.append(lambda opened: app.router.routes.extend(plugin_routes(opened)))
    else:
        app.router.routes.extend(plugin_routes(source))
    return app


def routes(
    engine: Engine | EngineLifespan,
    *,
    served_model_name: str | Sequence[str] | None = None,
    settings: Settings | None = None,
) -> list[BaseRoute]:
    """Return the routes, to be mounted into an application that exists.

    They never own the engine: the host opens it, with ``engine_lifespan(config)`` or otherwise.
    """
    return _routes(Service(engine, _settings(settings, served_model_name)))


def plugin_routes(engine: Engine) -> list[BaseRoute]:
    """Return the routes of surfaces that plugins registered, this one left out."""
    surfaces = engine.manager.registry("apis")
    return [route for name, surface in surfaces.items() if name != "openai" for route in surface(engine)]


def _settings(settings: Settings | None, names: str | Sequence[str] | None) -> Settings:
    settings = settings or Settings()
    return settings if names is None else dataclasses.replace(settings, served_model_name=names_of(names))


def _routes(service: Service) -> list[BaseRoute]:
    pages, swagger = _Pages(service), Swagger()
    return [
        Route("/v1/completions", Completions(service), name="completions"),
        Route("/v1/chat/completions", ChatCompletions(service), name="chat_completions"),
        Route("/v1/embeddings", Embeddings(service), name="embeddings"),
        Route("/v1/models", _Page(pages.models), name="models"),
        Route("/v1/models/{model:path}", _Page(pages.model), name="model"),
        Route("/v1/capabilities", _Page(pages.capabilities), name="capabilities"),
        Route("/health", _Page(pages.health), name="health"),
        Route("/health/live", _Page(pages.live), name="live"),
        Route("/health/ready", _Page(pages.health), name="ready"),
        Route("/metrics", _Page(pages.metrics), name="metrics"),
        *native_routes(service),
        Route("/openapi.json", _Page(pages.document), name="openapi"),
        Route("/docs", swagger, name="docs"),
        Route("/docs/{file}", swagger, name="docs_file"),
    ]


class _Page:
    """A GET route as plain ASGI, so that a host's own error pages never answer for it."""

    def __init__(self, show: Callable[[Scope, Send], Awaitable[None]]) -> None:
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            if scope["method"] not in ("GET", "HEAD"):
                raise wrong_method(scope["method"], ("GET", "HEAD"))
            await self._show(scope, send)
        except Exception as error:
            await send_error(send, to_api_error(error, "-"))


class _Pages:
    """The pages that tell about an engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, scope: Scope, send: Send) -> None:
        engine = self._service.ready()
        cards = [self._card(name, engine) for name in self._service.names()]
        await send_json(send, {"object": "list", "data": cards})

    async def model(self, scope: Scope, send: Send) -> None:
        engine, name = self._service.ready(), scope["path_params"]["model"]
        if name not in self._service.names():
            raise model_not_found(name, self._service.names())
        await send_json(send, self._card(name, engine))

    async def capabilities(self, scope: Scope, send: Send) -> None:
        engine = self._service.ready()
        await send_json(send, _can_do(engine, self._service.names()))

    async def document(self, scope: Scope, send: Send) -> None:
        engine = self._service.ready()
        await send_json(send, document(engine, self._service.names(), scope.get("root_path", "")))

    async def health(self, scope: Scope, send: Send) -> None:
        health = self._service.health()
        await _send_health(send, health, health.ok)

    async def live(self, scope: Scope, send: Send) -> None:
        """Tell whether to leave the process alone: it makes progress, or is about to."""
        health = self._service.health()
        await _send_health(send, health, health.status not in ("wedged", "unhealthy"))

    async def metrics(self, scope: Scope, send: Send) -> None:
        engine = self._service.ready()
        sinks = [sink for sink in engine.manager.registry("metrics").values() if hasattr(sink, "render")]
        if not sinks:
            raise not_found("/metrics: no plugin renders metrics")
        data = sinks[0].render(await engine.total_stats(), self._service.names()[0])
        await send_bytes(send, data, content_type=sinks[0].content_type.encode("latin-1"))

    def _card(self, name: str, engine: Engine) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "slotline",
            "max_model_len": engine.max_model_len,
        }


async def _send_health(send: Send, health: Health, ok: bool) -> None:
    body: dict[str, Any] = {"status": health.status, "detail": health.detail}
    if not ok:
        body |= ApiError(503, health.detail, type="unavailable_error", code=health.status).envelope()
    await send_json(send, body, status=200 if ok else 503)


def _can_do(engine: Engine, names: Sequence[str]) -> dict[str, Any]:
    """Return what a client may ask of this server, as JSON: the backend's capabilities within the server's limits."""
    can = engine.capabilities
    return {
        "version": slotline.__version__,
        "backend": engine.config.backend,
        "model": names[0],
        "models": list(names),
        "max_model_len": engine.max_model_len,
        **{name: _in_order(value) for name, value in dataclasses.asdict(can).items()},
        "max_logprobs": logprob_cap(engine) if can.logprobs else 0,
    }


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer for a path that no route has."""
    assert isinstance(error, HTTPException)
    shown = not_found(request.url.path) if error.status_code == 404 else ApiError(error.status_code, error.detail)
    return _response(shown)


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(to_api_error(error, "-"))


def _response(error: ApiError) -> Response:
    return Response(to_json(error.envelope()), error.status, error.headers, media_type=JSON_TYPE[1].decode())
