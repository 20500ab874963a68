"""``slotline score``: how likely texts are under a model."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from slotline.apis.cli.console import make_streams_safe, write
from slotline.apis.cli.options import engine_options
from slotline.apis.cli.session import Session, open_session
from slotline.apis.cli.tables import token_line
from slotline.config import EngineConfig
from slotline.scoring import Score


@click.command()
@engine_options(model_is_option=True)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Score what is in a file; may be given several times.",
)
@click.option("--lines", is_flag=True, help="Score each line of files or stdin that is not empty on its own.")
@click.option("--tokens", is_flag=True, help="List each token with its log-probability.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a text, with everything in it.")
def score(
    config: EngineConfig, texts: Sequence[str], files: Sequence[Path], lines: bool, tokens: bool, as_json: bool
) -> None:
    """Say how likely each TEXT is: the sum of its tokens' log-probabilities, their mean, and the perplexity.

    Nothing is generated, and the first token of a text has no value. Without TEXT and --file, what is scored is stdin
    without its last line break. Logarithms are natural.
    """
    make_streams_safe()
    wanted = [*texts, *_read(files, lines, stdin=not texts and not files)]
    if not wanted:
        raise click.UsageError("there is no text to score")
    with open_session(config) as session:
        for text, result in _scores(session, wanted):
            report = _report(session, text, result)
            write(json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n" if as_json else _shown(report, tokens))


def _read(files: Sequence[Path], lines: bool, *, stdin: bool) -> Iterator[str]:
    contents = [_text_of(path) for path in files]
    if stdin:
        if sys.stdin.isatty():
            raise click.UsageError("give a TEXT or --file, or pipe a text in")
        contents.append(sys.stdin.read())
    for content in contents:
        if lines:
            yield from (line for line in content.splitlines() if line.strip())
        else:
            yield content.removesuffix("\n")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is not UTF-8 text") from None


def _scores(session: Session, texts: Sequence[str]) -> Iterator[tuple[str, Score]]:
    """Yield each text with its score, as many at a time as there are slots."""
    step = session.engine.config.max_slots
    for start in range(0, len(texts), step):
        part = texts[start : start + step]
        yield from zip(part, session.score(part), strict=True)


def _report(session: Session, text: str, result: Score) -> dict[str, Any]:
    scored = sum(value is not None for value in result.logprobs)
    return {
        "text": text,
        "token_ids": result.token_ids,
        "tokens": [session.engine.vocabulary.spell(token_id) for token_id in result.token_ids],
        "logprobs": result.logprobs,
        "sum": result.total,
        "mean": result.total / scored if scored else None,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "scored_tokens": scored,
    }


def _shown(report: dict[str, Any], tokens: bool) -> str:
    pairs = zip(report["tokens"], report["logprobs"], strict=True)
    listed = [token_line(token, value).rstrip() for token, value in pairs] if tokens else []
    if report["scored_tokens"]:
        values = (
            f"sum {report['sum']:.4f}, mean {report['mean']:.4f}, perplexity {report['perplexity'] or math.inf:.4f}"
        )
    else:
        values = "no token that others come before, so there is nothing to score"
    count = len(report["token_ids"])
    return "\n".join([*listed, f"{count} token{'s' * (count != 1)}: {values}"]) + "\n"
