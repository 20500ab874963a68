"""The ``slotline`` command with its own subcommands; plugins may add more."""

from __future__ import annotations

import click

import slotline
from slotline.apis.cli.chat import chat
from slotline.apis.cli.doctor import doctor
from slotline.apis.cli.generate import generate
from slotline.apis.cli.group import CommandLine
from slotline.apis.cli.models import models
from slotline.apis.cli.plugins import plugins
from slotline.apis.cli.score import score
from slotline.apis.cli.serve import serve

COMMANDS: tuple[click.Command, ...] = (chat, generate, score, serve, models, plugins, doctor)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(slotline.__version__, message="slotline %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback where something fails.")
def cli(debug: bool) -> None:
    """Run language models: in the terminal, or behind OpenAI's HTTP routes."""


for _command in COMMANDS:
    cli.add_command(_command)
