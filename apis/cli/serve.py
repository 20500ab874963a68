"""``slotline serve``: the OpenAI routes on a port of their own."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from slotline.apis.cli.console import say
from slotline.apis.cli.group import CommandFailed
from slotline.apis.cli.options import engine_options
from slotline.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotline.apis.cli.server import ServerOptions
    from slotline.engine import Engine

Command = Any

_FILE = click.Path(exists=True, dir_okay=False)

_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
    ),
    click.option(
        "--api-workers",
        type=click.IntRange(0, 64),
        default=0,
        show_default=True,
        help="Processes that speak HTTP, apart from one that runs the engine; 0 does all in one.",
    ),
    click.option(
        "--served-model-name",
        multiple=True,
        help="Name that requests use; may be given several times. [default: MODEL]",
    ),
    click.option("--api-key-file", type=_FILE, help="File with API keys, one a line, a name before it or not."),
    click.option("--allowed-origin", multiple=True, help="Origin whose web pages may use the server; several, or *."),
    click.option("--tls-cert", type=_FILE, help="Certificate chain (PEM); with --tls-key the server speaks HTTPS."),
    click.option("--tls-key", type=_FILE, help="Private key (PEM) of the certificate."),
    click.option(
        "--drain-timeout",
        type=click.IntRange(0),
        default=30,
        show_default=True,
        help="Seconds that running answers get to end after SIGTERM or Ctrl-C; a second signal ends them at once.",
    ),
    click.option("--request-timeout", type=float, help="Seconds an answer may take; no limit if not given."),
    click.option("--write-timeout", type=float, default=30.0, show_default=True, help="Seconds a client may not read."),
    click.option(
        "--header-timeout", type=float, default=30.0, show_default=True, help="Seconds for a request's head to arrive."
    ),
    click.option("--keep-alive", type=int, default=5, show_default=True, help="Seconds an idle connection stays open."),
    click.option("--max-body-bytes", type=int, default=32 * 2**20, show_default=True, help="Longest body; then 413."),
    click.option(
        "--max-header-bytes",
        type=int,
        default=64 * 1024,
        show_default=True,
        help="Longest head; then 431.",
    ),
    click.option(
        "--max-sessions",
        type=click.IntRange(0),
        default=256,
        show_default=True,
        help="Conversations kept for /v1/chat/interactive; none with several API workers.",
    ),
    click.option(
        "--session-timeout", type=float, default=3600.0, show_default=True, help="Seconds one is kept while unused."
    ),
    click.option("--access-log", is_flag=True, help="Log each request, without what it said."),
    click.option(
        "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Lines of the log."
    ),
)


def _server_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@engine_options()
@_server_options
def serve(
    config: EngineConfig, host: str, port: int, api_workers: int, log_format: str, access_log: bool, **given: Any
) -> None:
    """Serve MODEL behind OpenAI's routes."""
    from slotline.apis.cli.process import prepare

    if config.threads is None:
        config = config.with_options(threads=1)  # more of them spin between steps, and the loop needs a core
    listeners = _listen(host, port, api_workers)
    options = _options_of(listeners[0], api_workers, given)
    options.check()
    log = {"json": log_format == "json", "access": access_log}
    prepare(**log)
    if log_format == "text":  # else every line of stderr is JSON
        say(f"loading {config.model}")
    if api_workers:
        _serve_apart(config, options, listeners, log)
    else:
        _serve_here(config, options, listeners)


def _serve_here(config: EngineConfig, options: ServerOptions, listeners: list[socket.socket]) -> None:
    """Serve from this process, the engine in it."""
    from slotline.apis.cli.process import run_server
    from slotline.apis.cli.server import Server
    from slotline.apis.openai.service import EngineLifespan

    server = Server(partial(EngineLifespan, config, background=True), options)
    announce = _announcer(listeners[0], options)
    server.on_open(lambda engine: announce(engine.model.name, engine.max_model_len, cache_tokens(engine)))
    run_server(server, listeners)


def _serve_apart(
    config: EngineConfig, options: ServerOptions, listeners: list[socket.socket], log: dict[str, bool]
) -> None:
    """Serve from processes of their own: one for the engine, one for each listener."""
    from slotline.apis.cli.child import ChildSpec
    from slotline.apis.cli.supervisor import supervise

    announce = _announcer(listeners[0], options)
    supervise(
        partial(ChildSpec, config=config, options=options, log_json=log["json"], log_access=log["access"]),
        listeners,
        drain_timeout=options.drain_timeout,
        on_ready=lambda ready: announce(ready.model, ready.context, ready.cache_tokens),
    )


def _options_of(listener: socket.socket, workers: int, given: dict[str, Any]) -> ServerOptions:
    from slotline.apis.cli.server import ServerOptions
    from slotline.apis.openai.hosts import is_loopback
    from slotline.apis.openai.service import Settings

    sessions = given.pop("max_sessions")
    settings = Settings(
        served_model_name=tuple(given.pop("served_model_name")),
        request_timeout=given.pop("request_timeout"),
        write_timeout=given.pop("write_timeout"),
        max_body_bytes=given.pop("max_body_bytes"),
        max_sessions=0 if workers > 1 else sessions,  # the next turn may come to another process
        session_timeout=given.pop("session_timeout"),
        processes=max(workers, 1),
    )
    origins = tuple(given.pop("allowed_origin"))
    local = is_loopback(listener.getsockname()[0])
    return ServerOptions(local=local, allowed_origins=origins, settings=settings, **given)


def _listen(host: str, port: int, workers: int) -> list[socket.socket]:
    """Take the port before a model is loaded, with a socket for each worker.

    Raises:
        CommandFailed: it is in use, or the address is not this machine's.
    """
    from slotline.apis.cli.server import BACKLOG

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not workers:
            return [socket.create_server((host, port), family=family, backlog=BACKLOG)]
        from slotline.apis.cli.supervisor import listen_apart

        return listen_apart(host, port, workers, BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise CommandFailed(f"cannot listen on {host} port {port}: {reason}") from None


def _announcer(listener: socket.socket, options: ServerOptions) -> Callable[[str, int, int], None]:
    """Return what prints where the server is, once its engine is there."""
    host, port = listener.getsockname()[:2]
    address = f"{'http' if options.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    names = options.settings.served_model_name

    def announce(model: str, context: int, cache: int) -> None:
        from slotline.apis.cli.process import tell

        tell(f"serving {', '.join(names) or model} at {address} (context {context}, KV cache {cache} tokens)")

    return announce


def cache_tokens(engine: Engine) -> int:
    """Return how many tokens the KV cache holds; block 0 is scratch."""
    return (engine.info.num_blocks - 1) * engine.info.block_size
