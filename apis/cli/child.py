"""A process that ``slotline serve --api-workers N`` starts: the engine, or one that speaks HTTP.

What it should do is the first line of its stdin, as JSON. Its stdin stays open for as long as its
parent lives: at the end of it, the process ends, too, so that none is left behind. The one line that
it writes to stdout says that it is ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Literal

import click
import msgspec

from slotline.apis.cli.group import in_one_line
from slotline.apis.cli.process import loop_factory, prepare, run_server, settle_memory
from slotline.apis.cli.serve import cache_tokens
from slotline.apis.cli.server import Server, ServerOptions
from slotline.apis.openai.service import EngineLifespan
from slotline.config import EngineConfig
from slotline.engine import Engine
from slotline.hosting import hosting

LOOK = 0.5  # seconds between two looks at the core's health
BROKEN = 70  # exit code of an engine process that cannot go on


class ChildSpec(msgspec.Struct):
    """What a child is told.

    Attributes:
        listen_fd: of the socket it serves, which it inherits.
        engine_path: of the engine's socket.
        again: it takes the place of one that ended.
    """

    role: Literal["engine", "api"]
    config: EngineConfig
    options: ServerOptions
    listen_fd: int
    engine_path: str
    log_json: bool
    log_access: bool
    again: bool = False


class Ready(msgspec.Struct):
    """What a child says once it is ready; the numbers are for people."""

    model: str
    context: int
    cache_tokens: int


class RemoteLifespan(EngineLifespan):
    """Connect to an engine process when an application starts.

    Args:
        patient: start-up waits for the engine, and connections wait in the socket; a process that takes the
            place of another does so, lest it refuses what the other would have answered.
    """

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        *,
        patient: bool,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(config, background=True, on_failure=self._failed)
        self._path = path
        self._patient = patient
        self._tell = on_failure
        self._settled = asyncio.Event()
        self.on_open.append(lambda _: self._settled.set())

    @asynccontextmanager
    async def __call__(self, app: object = None) -> AsyncIterator[None]:
        """Hold the connection while the application runs."""
        async with super().__call__(app):
            if self._patient:
                await self._settled.wait()
            yield

    def open(self) -> AbstractAsyncContextManager[Engine]:
        """Wait for the engine process."""
        return Engine.connect(self._path, self.config)

    def _failed(self, error: BaseException) -> None:
        self._settled.set()
        self._tell(error)


def main() -> None:
    """Run what stdin says."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    prepare(json=spec.log_json, access=spec.log_access)
    try:
        in_one_line(lambda: run_engine(spec) if spec.role == "engine" else run_api(spec))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def run_api(spec: ChildSpec) -> None:
    """Serve HTTP on the inherited socket until a signal, or the parent's end."""
    listener = socket.socket(fileno=spec.listen_fd)
    make_lifespan = partial(RemoteLifespan, spec.engine_path, spec.config, patient=spec.again)
    server = Server(make_lifespan, spec.options)
    server.on_open(lambda engine: _tell_ready(ready_of(engine)))
    server.beside(partial(_until_orphan, server.stop))
    run_server(server, [listener])


def run_engine(spec: ChildSpec) -> None:
    """Run the engine behind the inherited socket until a signal, or the parent's end; exit when it is broken."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_host(spec))


async def _host(spec: ChildSpec) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    watch = asyncio.ensure_future(_until_orphan(over.set))
    async with hosting(spec.config, socket.socket(fileno=spec.listen_fd)) as core:
        settle_memory()
        _tell_ready(Ready("", core.scheduler.longest, 0))
        while not over.is_set():
            if core.error is not None or core.wedged:
                os._exit(BROKEN)  # its backend may never return, so it is not waited for
            try:
                await asyncio.wait_for(over.wait(), LOOK)
            except TimeoutError:
                continue
    watch.cancel()


def ready_of(engine: Engine) -> Ready:
    """Return what to say of an engine that is there."""
    return Ready(engine.model.name, engine.max_model_len, cache_tokens(engine))


def _tell_ready(ready: Ready) -> None:
    os.write(1, msgspec.json.encode(ready) + b"\n")


async def _until_orphan(end: Callable[[], None]) -> None:
    """Read stdin to its end, which is the parent's; then call ``end``."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    end()


if __name__ == "__main__":
    main()
