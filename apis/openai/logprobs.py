"""Logprobs in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from slotline.logprobs import Logprobs, TokenLogprob
from slotline.request import Completion
from slotline.text import Vocabulary


def chat_content(logprobs: Logprobs, width: int) -> list[dict[str, Any]]:
    """Return ``logprobs.content`` of a chat choice: an entry per token, its ``width`` best beside it."""
    return [_chat_entry(logprobs.entries(i), width) for i in range(len(logprobs))]


def _chat_entry(entries: list[TokenLogprob], width: int) -> dict[str, Any]:
    # The token itself comes first; among the best it stands where its rank puts it.
    best = sorted((entry for entry in entries if entry.rank <= width), key=lambda entry: entry.rank)
    return {**_named(entries[0]), "top_logprobs": [_named(entry) for entry in best]}


def _named(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def mean_logprob(choice: Completion) -> float:
    """Return how likely a choice is by token, by which ``best_of`` picks; one without tokens comes last."""
    values = [row[token_id] for token_id, row in zip(choice.token_ids, choice.logprobs or (), strict=True) if row]
    return math.fsum(values) / len(values) if values else -math.inf


def prompt_logprobs(logprobs: Logprobs) -> list[dict[str, Any] | None]:
    """Return the extension ``prompt_logprobs``: null for the first position, then a table by token id."""
    table: list[dict[str, Any] | None] = []
    for position in range(len(logprobs)):
        entries = logprobs.entries(position)
        row = {str(e.token_id): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.text} for e in entries}
        table.append(row or None)
    return table


class CompletionLogprobs:
    """Build the ``logprobs`` of one completions choice, piece by piece: offsets go on where they were.

    An offset counts the characters of text before the token's first byte, so bytes that are not yet
    a character count once they have become one.
    """

    __slots__ = ("_decoder", "_offset", "_skip_special", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def piece(self, token_ids: Sequence[int], logprobs: Logprobs | None, *, shown: bool = False) -> dict[str, Any]:
        """Return the four lists for new tokens.

        Args:
            token_ids: the tokens.
            logprobs: their values; positions without one (a prompt's first) get null.
            shown: special tokens among them are part of the text, as those of an echoed prompt are.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position, token_id in enumerate(token_ids):
            entries = logprobs.entries(position) if logprobs is not None else []
            tokens.append(self._vocabulary.spell(token_id))
            values.append(entries[0].logprob if entries else None)
            tops.append(_by_spelling(entries) if entries else None)
            offsets.append(self._advance(token_id, shown))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _advance(self, token_id: int, shown: bool) -> int:
        before = self._offset
        hidden = self._skip_special and not shown and token_id in self._vocabulary.special_ids
        if not hidden:
            self._offset += len(self._decoder.decode(self._vocabulary.bytes_of(token_id)))
        return before


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several pieces of completions logprobs as one."""
    first, *rest = parts
    return {name: [*first[name], *(value for part in rest for value in part[name])] for name in first}


def _by_spelling(entries: list[TokenLogprob]) -> dict[str, float]:
    """Return spelling -> value; the token that is there comes first and keeps its spelling.

    Another candidate spelt like one before it is named by its id: vocabularies hold a byte as a
    token of its own beside the character, and ids that the tokenizer does not know spell nothing.
    """
    table: dict[str, float] = {}
    for entry in entries:
        name = entry.text if entry.text not in table else f"token_id:{entry.token_id}"
        table[name] = entry.logprob
    return table
