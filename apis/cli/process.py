"""What a server's process sets for itself, once: its log, its limits, its collector, its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import click

from slotline.apis.cli.group import CommandFailed
from slotline.apis.cli.logs import set_up_logs
from slotline.apis.cli.server import Server
from slotline.errors import SlotlineError


def prepare(*, json: bool, access: bool) -> None:
    """Set up the log, and allow as many connections as the system does."""
    set_up_logs(json=json, access=access)
    if sys.platform != "win32":
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):  # some systems call it unlimited and mean less
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_server(server: Server, sockets: Sequence[socket.socket]) -> None:
    """Serve until a signal or a failure of the engine.

    Raises:
        SlotlineError, CommandFailed: what the engine failed of.
    """
    server.on_open(lambda _: settle_memory())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.serve(sockets=list(sockets)))
    close_streams()
    if server.failure is not None:
        if isinstance(server.failure, SlotlineError):
            raise server.failure
        raise CommandFailed(f"{type(server.failure).__name__}: {server.failure}") from server.failure


def tell(text: str) -> None:
    """Print a line on stdout; a server runs on where nobody takes it."""
    with contextlib.suppress(OSError):
        click.echo(text)


def loop_factory() -> Any:
    """Return what makes the event loop: uvloop's where there is one."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def settle_memory() -> None:
    """Leave what is loaded out of every later collection, of which a full one would halt all streams."""
    gc.collect()
    gc.freeze()


def close_streams() -> None:
    """Flush stdout and stderr; where that fails, keep the interpreter from failing over it at its exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
