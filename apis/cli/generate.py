"""``slotline generate``: continue a text."""

from __future__ import annotations

import sys
from typing import Any

import click

from slotline.apis.cli.console import make_streams_safe, write
from slotline.apis.cli.options import engine_options, sampling_options
from slotline.apis.cli.session import open_session
from slotline.config import EngineConfig
from slotline.params import SamplingParams


@click.command()
@engine_options(without=("seed",))
@sampling_options(max_tokens=256)
@click.option("--prompt", help="The text to continue; read from stdin if not given.")
def generate(config: EngineConfig, sampling: dict[str, Any], prompt: str | None) -> None:
    """Continue a text with MODEL; no chat template is applied.

    The text is --prompt, or all of stdin without its last line break. stdout has the continuation alone.
    """
    make_streams_safe()
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("give --prompt, or pipe a text in")
        prompt = sys.stdin.read().removesuffix("\n")
    with open_session(config) as session:
        for piece in session.stream(prompt, SamplingParams(**sampling)):
            write(piece)
        write("\n")
