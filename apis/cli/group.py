"""The group of commands: plugins add to it, and errors end as one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slotline.errors import ConfigError, SlotlineError
from slotline.manager import PluginManager

T = TypeVar("T")


class CommandFailed(click.ClickException):
    """One line on stderr and an exit code."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class WrittenWrong(CommandFailed):
    """The same for what the caller wrote: an option or a config file."""

    exit_code = 2


class CommandLine(click.Group):
    """Commands of its own and of plugins, which are loaded when a name is not its own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, plugins' after the built-in ones."""
        own = list(self.commands)
        return own + [name for name in self._others(ctx, quiet=True) if name not in own]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        own = super().get_command(ctx, cmd_name)
        return own if own is not None else self._others(ctx, quiet=False).get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; its errors become one line, unless --debug."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        return in_one_line(lambda: super(CommandLine, self).invoke(ctx))

    def _others(self, ctx: click.Context, *, quiet: bool) -> dict[str, click.Command]:
        found: dict[str, click.Command] | None = ctx.meta.get(__name__)
        if found is None:
            try:
                found = dict(PluginManager().registry("commands"))
            except SlotlineError as error:
                if not quiet:
                    raise CommandFailed(error.message) from None
                found = {}  # --help works with a broken plugin; running a command says what is wrong
            ctx.meta[__name__] = found
        return found


def in_one_line(run: Callable[[], T]) -> T:
    """Call ``run``; turn what it raises into an error of one line.

    Raises:
        CommandFailed: with exit code 2 for what the caller wrote, 1 for everything else.
    """
    try:
        return run()
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise
    except Exception as error:
        cause = _single(error)
        if isinstance(cause, SlotlineError):
            kind = WrittenWrong if isinstance(cause, ConfigError) else CommandFailed
            raise kind(" ".join(cause.message.split())) from None
        message = f"{type(cause).__name__}: {cause}; `slotline --debug ...` shows where"
        raise CommandFailed(" ".join(message.split())) from None


def _single(error: BaseException) -> BaseException:
    """Return the one error inside a group of one; task groups wrap what their tasks raise."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
