"""``slotline generate``: continue a text."""

from __future__ import annotations

import sys
from typing import Any

import click

from slotline.apis.cli.console import make_streams_safe, write
from slotline.apis.cli.options import engine_options, sampling_options
from slotline.apis.cli.session import open_session
from slotline.apis.cli.tables import logprob_lines
from slotline.config import EngineConfig
from slotline.params import LOGPROBS_MODES, SamplingParams
from slotline.request import Output


@click.command()
@engine_options(without=("seed",))
@sampling_options(max_tokens=256)
@click.option("--prompt", help="The text to continue; read from stdin if not given.")
@click.option(
    "--logprobs", type=int, help="Print a line a token instead: log-probability, token, and this many of the likeliest."
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(LOGPROBS_MODES),
    help="Of the model alone, or of what was sampled from. [default: raw]",
)
def generate(
    config: EngineConfig, sampling: dict[str, Any], prompt: str | None, logprobs: int | None, logprobs_mode: str | None
) -> None:
    """Continue a text with MODEL; no chat template is applied.

    The text is --prompt, or all of stdin without its last line break. stdout has the continuation alone.
    """
    make_streams_safe()
    params = SamplingParams(**sampling, logprobs=logprobs, logprobs_mode=logprobs_mode)
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("give --prompt, or pipe a text in")
        prompt = sys.stdin.read().removesuffix("\n")
    with open_session(config) as session:
        as_text = True
        for output in session.outputs(prompt, params):
            as_text = output.logprobs is None  # as it is without --logprobs, and on a backend that has none
            write(_shown(output, logprobs or 0))
        if as_text:
            write("\n")


def _shown(output: Output, width: int) -> str:
    if output.logprobs is None:
        return output.text
    return "".join(f"{line}\n" for line in logprob_lines(output.logprobs, width))
