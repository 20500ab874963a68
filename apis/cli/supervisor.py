"""The parent of ``slotline serve --api-workers N``: it holds the sockets, starts the processes, and starts them again.

It keeps every socket open itself, so that a connection that arrives while a process is away waits for
the next one. It never touches a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slotline.apis.cli.child import ChildSpec, Ready
from slotline.apis.cli.group import CommandFailed
from slotline.apis.cli.process import close_streams
from slotline.remote import RemoteClient

log = logging.getLogger("slotline.serve")

WATCH = 0.5  # seconds between two looks at the engine process
LEAST_SILENCE = 3.0  # seconds without a sign of life that are never too long, however short the stall timeout
RESTARTS, WITHIN = 5, 60.0  # a process that ends so often in so many seconds is not started again
MARGIN = 10.0  # seconds beyond the drain timeout after which a process that does not end is killed


class Child:
    """One process, started again when it ends.

    Args:
        name: for the log.
        spec: what it is told.
        on_ready: called each time it is ready.
    """

    def __init__(self, name: str, spec: ChildSpec, on_ready: Callable[[Ready], None]) -> None:
        self.name = name
        self.spec = spec
        self._on_ready = on_ready
        self._process: asyncio.subprocess.Process | None = None
        self._ends: deque[float] = deque(maxlen=RESTARTS)
        self._stopping = False
        self._was_ready = False

    async def keep(self) -> int:
        """Run until told to stop; return the exit code.

        Raises:
            CommandFailed: it cannot be started, or ends again and again.
        """
        while True:
            code = await self._run()
            if self._stopping:
                return code
            if not self._was_ready:
                raise CommandFailed(f"the {self.name} process could not start")  # it has said why
            self._ends.append(time.monotonic())
            if len(self._ends) == RESTARTS and self._ends[-1] - self._ends[0] < WITHIN:
                raise CommandFailed(f"the {self.name} process ended {RESTARTS} times within {WITHIN:g} seconds")
            self.spec = msgspec.structs.replace(self.spec, again=True)
            log.warning("the %s process ended (%s); starting another", self.name, _reason(code))

    def stop(self) -> None:
        """Ask it to end, and not to be started again."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, and do not start it again."""
        self._stopping = True
        self.replace()

    def replace(self) -> None:
        """End it now; unless it was told to stop, another is started."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run(self) -> int:
        command = [sys.executable, "-P", "-m", "slotline.apis.cli.child", self.spec.role]  # the role is for people
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self.spec.listen_fd,),
            start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
            await process.stdin.drain()
        if self._stopping:
            process.terminate()
        if line := await process.stdout.readline():
            self._was_ready = True
            self._on_ready(msgspec.json.decode(line, type=Ready))
        return await process.wait()


class Supervisor:
    """The engine process and those that speak HTTP.

    Args:
        engine, workers: what each is told.
        sockets: those that the children serve; closed when no more connections are wanted.
        drain_timeout: seconds that workers get to end.
        on_ready: called once, when all are ready.
    """

    def __init__(
        self,
        engine: ChildSpec,
        workers: Sequence[ChildSpec],
        sockets: Sequence[socket.socket],
        *,
        drain_timeout: float,
        on_ready: Callable[[Ready], None],
    ) -> None:
        self._engine = Child("engine", engine, lambda ready: None)
        self._workers = [Child(f"API {i + 1}", spec, self._worker_ready) for i, spec in enumerate(workers)]
        self._sockets = sockets
        self._patience = drain_timeout + MARGIN
        self._on_ready = on_ready
        self._missing = len(workers)
        self._signals = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Run until a signal.

        Raises:
            CommandFailed: a process cannot be started or kept.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        engine = asyncio.ensure_future(self._engine.keep())
        workers = [asyncio.ensure_future(worker.keep()) for worker in self._workers]
        over = asyncio.ensure_future(self._over.wait())
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({engine, over, *workers}, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in (engine, *workers) if task.done()), None)
            await self._drain(workers)
        finally:
            self._engine.stop()
            over.cancel()
            watch.cancel()
            await self._gone(self._engine, [engine])
        if failed is not None:
            raise failed

    async def _watch(self) -> None:
        """Replace an engine process that is there and says nothing, which no exit code will ever tell."""
        client = RemoteClient(self._engine.spec.engine_path)
        patience = max(self._engine.spec.config.stall_timeout, LEAST_SILENCE)
        listening = asyncio.ensure_future(client.run())
        try:
            while True:
                await asyncio.sleep(WATCH)
                if client.silence > patience:
                    log.error("the engine process has said nothing for %.0f s; killing it", client.silence)
                    self._engine.replace()
        finally:
            listening.cancel()

    def _signalled(self) -> None:
        self._signals += 1
        self._over.set()
        if self._signals > 1:
            for worker in self._workers:
                worker.stop()  # a second signal ends one at once

    async def _drain(self, workers: Sequence[asyncio.Future[int]]) -> None:
        """Take no more connections, and let the workers end what they have."""
        for each in self._sockets:
            each.close()
        for worker in self._workers:
            worker.stop()
        for worker, task in zip(self._workers, workers, strict=True):
            await self._gone(worker, [task])

    async def _gone(self, child: Child, tasks: Sequence[asyncio.Future[int]]) -> None:
        _, late = await asyncio.wait(tasks, timeout=self._patience)
        if late:
            log.error("the %s process did not end; killing it", child.name)
            child.kill()
            await asyncio.wait(late)

    def _worker_ready(self, ready: Ready) -> None:
        self._missing -= 1
        if not self._missing:
            self._on_ready(ready)


def supervise(
    make_spec: Callable[..., ChildSpec],
    listeners: Sequence[socket.socket],
    *,
    drain_timeout: float,
    on_ready: Callable[[Ready], None],
) -> None:
    """Run the processes until a signal.

    Args:
        make_spec: makes what a child is told, of its role, the descriptor of its socket, the engine's path.
        listeners: one a worker.
    """
    with tempfile.TemporaryDirectory(prefix="slotline-") as folder, socket.socket(socket.AF_UNIX) as inner:
        path = str(Path(folder) / "engine")  # the folder is open to this user alone, and so is the engine
        inner.bind(path)
        inner.listen(socket.SOMAXCONN)
        engine = make_spec(role="engine", listen_fd=inner.fileno(), engine_path=path)
        workers = [make_spec(role="api", listen_fd=each.fileno(), engine_path=path) for each in listeners]

        async def run() -> None:
            await Supervisor(engine, workers, [*listeners, inner], drain_timeout=drain_timeout, on_ready=on_ready).run()

        asyncio.run(run())
    close_streams()


def listen_apart(host: str, port: int, count: int, backlog: int) -> list[socket.socket]:
    """Return sockets that share a port; the system spreads connections over them.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as probe:  # others of this user could share it unasked
        port = probe.getsockname()[1]
    return [socket.create_server((host, port), family=family, backlog=backlog, reuse_port=True) for _ in range(count)]


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return os.strerror(-code)
