"""uvicorn as ``slotline serve`` runs it: it drains on SIGTERM and exits with 0, and ends when the engine fails."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from slotline.apis.openai.app import create_app
from slotline.apis.openai.hosts import LocalNamesOnly
from slotline.apis.openai.service import EngineLifespan, Settings
from slotline.config import EngineConfig
from slotline.engine import Engine


class Server(uvicorn.Server):
    """An HTTP server around one engine, which loads while the server already answers /health.

    Args:
        local: it listens on the loopback address, and answers for loopback names only.

    Attributes:
        failure: why the engine could not be started or went on no longer.
    """

    def __init__(
        self, config: EngineConfig, settings: Settings, *, local: bool, drain_timeout: int, access_log: bool
    ) -> None:
        self.failure: BaseException | None = None
        self._lifespan = EngineLifespan(config, background=True, on_failure=self._fail)
        app: ASGIApp = create_app(self._lifespan, settings=settings)
        super().__init__(
            uvicorn.Config(
                LocalNamesOnly(app) if local else app,
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=access_log,
                timeout_graceful_shutdown=drain_timeout,
                server_header=False,
            )
        )

    def on_open(self, tell: Callable[[Engine], None]) -> None:
        """Call ``tell`` when the engine is there."""
        self._lifespan.on_open.append(tell)

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
