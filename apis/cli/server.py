"""uvicorn as ``slotline serve`` runs it: guarded, drained on SIGTERM with exit code 0, ended when the engine fails."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from slotline.apis.cli.protocol import GuardedProtocol, Limits, ServerConfig
from slotline.apis.openai.app import create_app
from slotline.apis.openai.hosts import LocalNamesOnly
from slotline.apis.openai.keys import ApiKeys, RequireKey
from slotline.apis.openai.middleware import Frame, LimitBody
from slotline.apis.openai.service import EngineLifespan, Settings
from slotline.engine import Engine
from slotline.errors import ConfigError

BACKLOG = 2048
LOOKS = 10  # ticks of 0.1 s between two looks at the connections
EXPOSED = ("X-Request-Id", "Retry-After")  # headers that a page of an allowed origin may read


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the server, as against those of the routes and of the engine.

    Attributes:
        local: it listens on the loopback address, and answers for loopback names only.
        drain_timeout: seconds that running answers get to end after a signal.
        keep_alive: seconds an idle connection stays open between requests.
        header_timeout: seconds for a request's head to arrive.
        max_header_bytes: of a request's head.
        tls_cert, tls_key: files; TLS is on where both are given.
        api_key_file: keys that are accepted; none means that all requests are.
        allowed_origins: origins whose pages may use the server.
    """

    local: bool = False
    drain_timeout: int = 30
    keep_alive: int = 5
    header_timeout: float = 30.0
    max_header_bytes: int = 64 * 1024
    tls_cert: str | None = None
    tls_key: str | None = None
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)

    def check(self) -> None:
        """Read the files that the options name.

        Raises:
            ConfigError: one cannot be used.
        """
        ApiKeys.from_sources(self.api_key_file)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both or neither")
        if self.tls_cert is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"the TLS certificate or key cannot be used: {error.strerror or error}") from None

    @property
    def limits(self) -> Limits:
        """Return the bounds of a connection."""
        return Limits(
            head_bytes=self.max_header_bytes,
            head_seconds=self.header_timeout,
            unread_seconds=self.settings.write_timeout,
        )


def guarded(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Put the layers around an application that the options ask for, the innermost first."""
    app = LimitBody(app, options.settings.max_body_bytes)
    keys = ApiKeys.from_sources(options.api_key_file)
    if len(keys):
        app = RequireKey(app, keys)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    if options.local:
        app = LocalNamesOnly(app)
    return Frame(app)


class Server(uvicorn.Server):
    """An HTTP server around one engine, which loads while the server already answers /health.

    Args:
        make_lifespan: makes what opens the engine in the background; gets ``on_failure``.
        options: of the server.

    Attributes:
        failure: why the engine could not be started or went on no longer.
    """

    def __init__(self, make_lifespan: Callable[..., EngineLifespan], options: ServerOptions) -> None:
        self.failure: BaseException | None = None
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._lifespan = lifespan = make_lifespan(on_failure=self._fail)
        super().__init__(
            ServerConfig(
                guarded(create_app(lifespan, settings=options.settings), options),
                limits=options.limits,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,  # the outermost layer writes one that has request ids
                backlog=BACKLOG,
                timeout_keep_alive=options.keep_alive,
                timeout_graceful_shutdown=options.drain_timeout,
                server_header=False,
                ssl_certfile=options.tls_cert,
                ssl_keyfile=options.tls_key,
            )
        )

    def beside(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task beside the server, for as long as that runs."""
        self._beside.append(task)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or a failure."""
        tasks = [asyncio.ensure_future(task()) for task in self._beside]
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()

    def stop(self) -> None:
        """Drain and end, as at a signal."""
        self.should_exit = True

    def on_open(self, tell: Callable[[Engine], None]) -> None:
        """Call ``tell`` when the engine is there."""
        self._lifespan.on_open.append(tell)

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections now and then."""
        if counter % LOOKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                cast("GuardedProtocol", connection).look(now)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn would raise it again at the end, and a drained server would exit with 143."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.should_exit = True
