"""``slotline serve``: the OpenAI routes on a port of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import click

from slotline.apis.cli.console import say
from slotline.apis.cli.group import CommandFailed
from slotline.apis.cli.options import engine_options
from slotline.config import EngineConfig
from slotline.errors import SlotlineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slotline.apis.cli.server import Server
    from slotline.engine import Engine

BACKLOG = 2048


@click.command()
@engine_options()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--served-model-name", multiple=True, help="Name that requests use; may be given several times. [default: MODEL]"
)
@click.option(
    "--drain-timeout",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that running answers get to end after SIGTERM or Ctrl-C; a second signal ends them at once.",
)
@click.option("--request-timeout", type=float, help="Seconds an answer may take; no limit if not given.")
@click.option("--write-timeout", type=float, default=30.0, show_default=True, help="Seconds a client may not read.")
@click.option("--access-log", is_flag=True, help="Log each request.")
def serve(
    config: EngineConfig,
    host: str,
    port: int,
    served_model_name: Sequence[str],
    drain_timeout: int,
    request_timeout: float | None,
    write_timeout: float,
    access_log: bool,
) -> None:
    """Serve MODEL behind OpenAI's routes."""
    from slotline.apis.cli.server import Server
    from slotline.apis.openai.hosts import is_loopback
    from slotline.apis.openai.service import Settings

    logging.basicConfig(level=logging.INFO if access_log else logging.WARNING, format="%(levelname)s %(message)s")
    if config.threads is None:
        config = config.with_options(threads=1)  # more of them spin between steps, and the loop needs a core
    settings = Settings(
        served_model_name=tuple(served_model_name), request_timeout=request_timeout, write_timeout=write_timeout
    )
    listener = _listen(host, port)
    local = is_loopback(listener.getsockname()[0])
    server = Server(config, settings, local=local, drain_timeout=drain_timeout, access_log=access_log)
    server.on_open(lambda engine: click.echo(_ready_line(engine, listener, settings.served_model_name)))
    say(f"loading {config.model}")
    _run(server, listener)


def _run(server: Server, listener: socket.socket) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))
    if server.failure is not None:
        if isinstance(server.failure, SlotlineError):
            raise server.failure
        raise CommandFailed(f"{type(server.failure).__name__}: {server.failure}") from server.failure


def _loop_factory() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded.

    Raises:
        CommandFailed: it is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise CommandFailed(f"cannot listen on {host} port {port}: {reason}") from None


def _ready_line(engine: Engine, listener: socket.socket, names: tuple[str, ...]) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    served = ", ".join(names) or engine.model.name
    cache = (engine.info.num_blocks - 1) * engine.info.block_size  # block 0 is scratch
    return f"serving {served} at http://{shown}:{port} (context {engine.max_model_len}, KV cache {cache} tokens)"
