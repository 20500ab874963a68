"""What the routes share: an engine, which may still be loading, and the server's own settings."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio

from slotline.apis.openai.errors import ApiError, logger, model_not_found
from slotline.apis.openai.running import Running
from slotline.config import EngineConfig
from slotline.engine import Engine, Health
from slotline.errors import EngineUnhealthy

HEALTH_PERIOD = 1.0  # seconds between looks at an engine that is served in the background


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the HTTP surface, as against the engine's.

    Attributes:
        served_model_name: names that requests may use; the model's own if empty. Answers carry the one used.
        max_body_bytes: longer bodies get 413.
        body_timeout: seconds for a body to arrive, then 408.
        write_timeout: seconds a client may leave what was written unread, then its request is aborted.
        request_timeout: seconds for a whole answer, then 504; None = no limit.
        max_sessions: conversations that the server keeps for /v1/chat/interactive; 0 keeps none.
        session_timeout: seconds that one is kept after its last answer.
        processes: how many of them share the port.
    """

    served_model_name: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    body_timeout: float = 60.0
    write_timeout: float = 30.0
    request_timeout: float | None = None
    max_sessions: int = 256
    session_timeout: float = 3600.0
    processes: int = 1


class EngineLifespan:
    """Open an engine when an application starts and close it when it ends.

    ::

        lifespan = EngineLifespan(EngineConfig(model="smollm2-135m"))
        app = Starlette(routes=[Mount("/llm", routes=routes(lifespan))], lifespan=lifespan)

    A host with a lifespan of its own enters ``async with lifespan(app)`` inside it.

    Args:
        config: of the engine.
        background: start serving at once and load beside it: /health says 503 until the engine is
            there. Otherwise start-up waits for the engine, and a model that cannot be opened fails it.
        on_failure: called when loading in the background failed, or the engine broke for good.

    Attributes:
        engine: the open engine; None before and after.
        failure: why there is none, where it was tried in the background.
        on_open: called with the engine, in order, before requests reach it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        background: bool = False,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.on_open: list[Callable[[Engine], None]] = []
        self._background = background
        self._on_failure = on_failure

    @asynccontextmanager
    async def __call__(self, app: object = None) -> AsyncIterator[None]:
        """Hold the engine open while the application runs."""
        if not self._background:
            async with self._opened():
                yield
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve)
            try:
                yield
            finally:
                group.cancel_scope.cancel()

    def open(self) -> AbstractAsyncContextManager[Engine]:
        """Open the engine; a lifespan that gets it elsewhere says so here."""
        return Engine.open(config=self.config)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Engine]:
        async with self.open() as engine:
            for opened in self.on_open:
                opened(engine)
            self.engine = engine
            try:
                yield engine
            finally:
                self.engine = None

    async def _serve(self) -> None:
        """Open the engine in a task of its own, and watch it."""
        try:
            async with self._opened() as engine:
                detail = await _until_broken(engine)
            raise EngineUnhealthy(detail)
        except Exception as error:
            self.failure = error
            if self._on_failure is None:
                logger.error("the engine is not available: %s", error)
            else:
                self._on_failure(error)


async def _until_broken(engine: Engine) -> str:
    """Watch the engine; return what is wrong once it cannot run any more."""
    while True:
        await anyio.sleep(HEALTH_PERIOD)
        health = engine.health()
        if health.status in ("unhealthy", "closed"):
            return f"the engine is {health.status}: {health.detail}"


class OpenEngine:
    """An engine that somebody else opened and will close."""

    failure: BaseException | None = None

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine


class Service:
    """The engine behind a set of routes.

    Args:
        source: an open engine, or the lifespan that opens one.
        settings: of the HTTP surface.

    Attributes:
        running: requests that are being answered.
    """

    def __init__(self, source: Engine | EngineLifespan, settings: Settings) -> None:
        self._source = source if isinstance(source, EngineLifespan) else OpenEngine(source)
        self.settings = settings
        self.created = int(time.time())
        self.running = Running()

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404.
        """
        names = self.names()
        if name not in names:
            raise model_not_found(name, names)

    def ready(self) -> Engine:
        """Return the engine.

        Raises:
            ApiError: 503 while it is loading, or after it failed to.
        """
        engine = self._source.engine
        if engine is not None:
            return engine
        state = self.health()
        raise ApiError(503, state.detail, type="unavailable_error", code=state.status, headers={"Retry-After": "5"})

    def health(self) -> Health:
        """Return the engine's health, or what there is instead of one."""
        engine = self._source.engine
        if engine is not None:
            return engine.health()
        if self._source.failure is not None:
            return Health("unhealthy", "the engine could not be started; see the log")
        return Health("loading", "the model is loading")

    def names(self) -> tuple[str, ...]:
        """Return the names under which the model is served, the first being its main one."""
        if self.settings.served_model_name:
            return self.settings.served_model_name
        return (public_name(self.ready().model.name),)


def logprob_cap(engine: Engine) -> int:
    """Return the most logprobs a token may have here; a backend without any is no reason to refuse a number."""
    cap = engine.config.max_logprobs
    return min(cap, engine.capabilities.max_logprobs) if engine.capabilities.logprobs else cap


def public_name(name: str) -> str:
    """Return the name by which a model is served: of a path on this machine, its last part."""
    if re.match(r"[/~.]|[A-Za-z]:[\\/]", name):
        last = re.split(r"[\\/]", name.rstrip("\\/"))[-1]
        return last if last.strip(".~") else "model"
    return name


def names_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one or several names as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
