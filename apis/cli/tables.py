"""Logprobs as lines: a token each, quoted so that a line break in it does not break the line."""

from __future__ import annotations

import json
from collections.abc import Iterator

from slotline.logprobs import Logprobs, TokenLogprob

WIDTH = 16  # characters kept for a token; longer ones shift the rest of their line


def logprob_lines(logprobs: Logprobs, width: int) -> Iterator[str]:
    """Yield a line for each position: value and token, then the ``width`` likeliest."""
    for position in range(len(logprobs)):
        entries = logprobs.entries(position)
        best = sorted((entry for entry in entries if entry.rank <= width), key=lambda entry: entry.rank)
        columns = [f"{entry.logprob:.4f} {quoted(entry.text)}" for entry in best]
        yield "  ".join([_aligned(entries[0]), *columns]).rstrip()


def token_line(text: str, logprob: float | None) -> str:
    """Return a line with a token and its value; the first token of a text has none."""
    shown = "-" if logprob is None else f"{logprob:.4f}"
    return f"{shown:>9}  {quoted(text):<{WIDTH}}"


def quoted(text: str) -> str:
    """Return a token in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _aligned(entry: TokenLogprob) -> str:
    return token_line(entry.text, entry.logprob)
