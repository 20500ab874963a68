"""Real servers for tests of operation: processes of their own, on the echo backend."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

COMMAND = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0"]


class Served:
    """A running server and what a test asks of it."""

    def __init__(self, folder: Path, *options: str, environ: dict[str, str] | None = None) -> None:
        self.log_file = folder / "log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *options], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"(https?)://127\.0\.0\.1:(\d+)", self.ready)
        if found is None:
            self.process.kill()
            self.process.communicate()
        assert found is not None, f"the server did not start: {self.log}"
        self.url, self.port = found[0], int(found[2])

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def tree(self) -> list[psutil.Process]:
        """Return the server's processes, its own first."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def post(self, route: str = "completions", **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{route}", json={"model": "echo", "max_tokens": 4, **fields}, timeout=30)

    def metrics(self) -> dict[str, float]:
        """Return slotline's values by name, and by reason where they have one."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            match = re.match(r"slotline:(\w+)\{(?:finished_reason=\"(\w+)\",)?model_name=\"[^\"]*\"\} (\S+)$", line)
            if match:
                found[f"{match[1]}:{match[2]}" if match[2] else match[1]] = float(match[3])
        return found

    def at_rest(self) -> dict[str, float]:
        """Look until nothing runs or waits; a test's own time limit ends it otherwise."""
        while True:
            now = self.metrics()
            if now["num_requests_running"] == now["num_requests_waiting"] == now["kv_blocks_active"] == 0:
                return now

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def raw(self, *, headers: str = "", **fields: Any) -> bytes:
        """Return a request for a completion as bytes."""
        body = json.dumps({"model": "echo", "prompt": "abc", **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


Serve = Callable[..., contextlib.AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Hand out ``with serve("--option", ...) as server``; processes left over are killed."""

    @contextlib.contextmanager
    def run(*options: str, **more: Any) -> Iterator[Served]:
        server = Served(tmp_path_factory.mktemp("server"), *options, **more)
        children = server.tree
        try:
            yield server
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                children += server.tree
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            server.process.communicate()

    return run


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Served]:
    """Return one server with default options, JSON lines for a log, and two seconds for a head."""
    options = ["--access-log", "--log-format", "json", "--header-timeout", "1", "--max-body-bytes", "1000000"]
    with serve(*options) as server:
        yield server
