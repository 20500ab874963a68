"""From token ids to text that can be shown: true bytes, whole characters, stop strings.

Text is what the joined bytes of the tokens decode to with ``errors="replace"``, never what single
tokens decode to. ``Vocabulary`` knows the bytes of each id; ``TextStream`` follows one answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotline.model import Tokenizer


class Vocabulary:
    """The bytes of every id, read from the tokenizer once and shared by all streams.

    Logits can be wider than the tokenizer: an id beyond the table has no bytes.
    """

    __slots__ = ("_bytes", "_literal", "_skipped", "special_ids")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = list(tokenizer.token_bytes())
        self.special_ids = tokenizer.special_ids
        self._literal = [_whole(data) for data in self._bytes]
        self._skipped = self._literal.copy()
        for token_id in self.special_ids:
            if token_id < len(self._skipped):
                self._skipped[token_id] = ""

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the true bytes of an id; a special token's are its spelling."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def spell(self, token_id: int) -> str:
        r"""Return how logprobs name a token: its text, or ``bytes:\xNN`` where that is no valid UTF-8."""
        data = self.bytes_of(token_id)
        text = _whole(data)
        return text if text is not None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def pieces(self, skip_special: bool) -> list[str | None]:
        """Return the shared table of texts by id, for reading only.

        None marks a fragment of a character; a special token is '' when skipped. A piece is valid
        only where no fragment came directly before it.
        """
        return self._skipped if skip_special else self._literal

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; what is not UTF-8 reads as U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.bytes_of(i) for i in ids if i not in skipped).decode(errors="replace")


class Stops:
    """Stop strings prepared for matching; the choices of a request share one."""

    __slots__ = ("failures", "heads", "strings")

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(text for text in strings if text))
        self.failures = tuple(_failures(text) for text in self.strings)
        self.heads = frozenset(text[0] for text in self.strings)


class TextStream:
    """Turn the token ids of one answer into text, as early as it is certain.

    All that ``push`` and ``finish`` return, joined, is the decoded text of all tokens, cut where a
    stop string begins (or ends, with ``include_stop``). Two things are held back, and released the
    moment they are settled: up to three bytes that may still become a character, and the longest
    end of the text that is the beginning of a stop string.

    A stop string counts if its last character appears with a token that has at least ``min_tokens``
    tokens before it; it may begin earlier. The first push in which one is complete ends the text. Of
    several complete in that push the one that begins first wins, then the shortest: the one that
    would have ended the text first, had it come character by character.

    Args:
        vocabulary: shared by all streams of a model.
        stop: strings, or ``Stops`` made once for several streams.
        include_stop: show the stop string that matched.
        skip_special: leave special tokens out; text on either side of one is joined.
        min_tokens: see above.
    """

    __slots__ = (
        "_early",
        "_held",
        "_include_stop",
        "_pieces",
        "_skip_special",
        "_states",
        "_stops",
        "_tail",
        "_vocabulary",
        "matched",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Stops | Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        stops = stop if isinstance(stop, Stops) else Stops(stop)
        self.matched: str | None = None
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces(skip_special)
        self._stops = stops if stops.strings else None
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._early = min_tokens + 1  # the token that brings it to 0 is the first to end the text
        self._tail = b""  # bytes of an unfinished character
        self._held = ""  # whole characters that may begin a stop string
        self._states = [0] * len(stops.strings)  # how much of each stop string the text ends with

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that can now be shown, often ''."""
        try:
            text = self._pieces[token_id]
        except IndexError:
            text = ""
        if text is None or self._tail:
            text = self._assemble(token_id)
        if self._stops is None:
            return text
        self._early -= 1
        return self._scan(text, self._stops, may_match=self._early <= 0)

    def finish(self) -> str:
        """Return what is held; bytes that never became a character read as U+FFFD.

        These characters belong to the last token, and may complete a stop string.
        """
        text, self._tail = self._tail.decode(errors="replace"), b""
        if self._stops is not None:
            text = self._scan(text, self._stops, may_match=self._early <= 0)
        text, self._held = text + self._held, ""
        return text

    def _assemble(self, token_id: int) -> str:
        """Join the token's bytes to the unfinished character before them."""
        skipped = self._skip_special and token_id in self._vocabulary.special_ids
        data = self._tail if skipped else self._tail + self._vocabulary.bytes_of(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        if self._tail[:1] == b"\xed" and self._tail[1:2] >= b"\xa0":
            # The beginning of a surrogate is never a character; the codec would wait for its end.
            text, self._tail = text + self._tail.decode(errors="replace"), b""
        return text

    def _scan(self, text: str, stops: Stops, *, may_match: bool) -> str:
        """Look for stop strings in what is held plus ``text``; return what is settled."""
        if self.matched is not None:
            return ""
        if not self._held and stops.heads.isdisjoint(text):
            return text
        best: tuple[int, int] | None = None
        held = 0
        for number, stop in enumerate(stops.strings):
            end, state = _advance(stop, stops.failures[number], self._states[number], text, may_match)
            self._states[number] = state
            held = max(held, state)
            if end is not None and (best is None or (end - len(stop), len(stop)) < best):
                best = end - len(stop), len(stop)
        text, before = self._held + text, len(self._held)
        if best is None:
            cut = len(text) - held
            self._held = text[cut:]
            return text[:cut]
        start, length = best[0] + before, best[1]
        self.matched = text[start : start + length]
        self._held = ""
        return text[: start + length] if self._include_stop else text[:start]


def _whole(data: bytes) -> str | None:
    """Return the text of ``data`` where it is valid UTF-8 on its own."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _failures(stop: str) -> list[int]:
    """Return, for each length k of a beginning of ``stop``, its longest proper end that is a beginning too."""
    table = [0, 0]
    for char in stop[1:]:
        k = table[-1]
        while k and stop[k] != char:
            k = table[k]
        table.append(k + (stop[k] == char))
    return table


def _advance(stop: str, failures: list[int], k: int, text: str, may_match: bool) -> tuple[int | None, int]:
    """Follow ``stop`` through ``text`` (Knuth, Morris and Pratt), ``k`` of its characters having come before.

    Returns:
        Where in ``text`` the first match ends, or None; and the length of the longest proper
        beginning of ``stop`` that the text now ends with.
    """
    position, size = 0, len(stop)
    while position < len(text):
        if not k:
            position = text.find(stop[0], position)
            if position < 0:
                return None, 0
        char = text[position]
        while k and stop[k] != char:
            k = failures[k]
        k += stop[k] == char
        position += 1
        if k == size:
            if may_match:
                return position, 0
            k = failures[k]
    return None, k
