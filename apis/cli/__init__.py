"""The command line: ``slotline chat``, ``generate``, ``score``, ``serve``, ``models``, ``plugins``, ``doctor``.

Importing this is cheap: an engine that is embedded loads it as a plugin and never uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotline.hookspecs import hookimpl


def main() -> None:
    """Run the command line; this is the console script."""
    from slotline.apis.cli.commandline import cli

    cli(prog_name="slotline")


@hookimpl
def slotline_register_commands(register: Callable[[Any], None]) -> None:
    """Register the built-in commands, whose names plugins then cannot take."""
    from slotline.apis.cli.commandline import COMMANDS

    for command in COMMANDS:
        register(command)
