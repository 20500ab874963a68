"""What goes where: answers to stdout and nothing else; progress, warnings and errors to stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from slotline.request import Notice

if TYPE_CHECKING:
    from rich.console import Console

# A terminal acts on these; a model must not move its cursor or retitle its window.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@cache
def stderr() -> Console:
    """Return the console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str, style: str = "dim") -> None:
    """Print a line for people on stderr; where nobody takes it, go on."""
    with suppress(OSError):
        stderr().print(text, style=style, markup=False, soft_wrap=True)


def warn(notices: Iterable[Notice]) -> None:
    """Print warnings that came with an answer."""
    for notice in notices:
        say(f"warning: {notice.message}", "yellow")


def status(text: str) -> AbstractContextManager[Any]:
    """Show that something is going on, where stderr is a terminal."""
    return stderr().status(text)


def write(text: str) -> None:
    """Write a piece of an answer to stdout at once."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROLS)
    sys.stdout.write(text)
    sys.stdout.flush()


def make_streams_safe() -> None:
    """Let texts contain any character, whatever the locale says: UTF-8 in pipes, no error anywhere."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
