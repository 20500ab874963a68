"""Text to ids and ids to bytes, on top of the tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from slotline.errors import InvalidParameter, TokenizerError

# A noncharacter stands where a control token goes while plain text is encoded around it.
_GUARD = "\ufdd0"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Added tokens that are not flagged special still steer many models (<think>, <tool_call>) ...
_MARKUP = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]")
# ... unless they are only HTML, which is text like any other.
_HTML = re.compile(
    r"</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token whose spelling must not be typed by a user.

    Attributes:
        special: flagged so by the tokenizer: left out of text.
        lstrip: takes the white space before it along.
        rstrip: takes the white space after it along.
    """

    id: int
    spelling: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What the files say about begin and end tokens.

    Attributes:
        bos: the begin token's spelling, "" for none.
        eos: the end token's spelling, "" for none.
        add_bos: put the begin token first; None leaves it to the tokenizer's own post-processor.
        add_eos: put the end token last, likewise.
        eos_ids: further end tokens.
    """

    bos: str = ""
    eos: str = ""
    add_bos: bool | None = None
    add_eos: bool | None = None
    eos_ids: frozenset[int] = frozenset()


class FastTokenizer:
    """A `slotline.model.Tokenizer` over a ``tokenizers.Tokenizer``; safe to use from many threads.

    Args:
        tokenizer: taken over; it must not be changed afterwards.
        special: begin and end tokens.

    Raises:
        TokenizerError: ids cannot be turned into bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        spec = json.loads(tokenizer.to_str())
        self.special = special
        self.controls = {token.spelling: token for token in _control_tokens(spec)}
        self._tokenizer = tokenizer
        self._plain = _plain_variant(spec, set(self.controls))
        self._guard_id = self._plain.token_to_id(_GUARD)
        self._special_ids = frozenset(token.id for token in self.controls.values() if token.special)
        self._bos_id = tokenizer.token_to_id(special.bos) if special.bos else None
        self._eos_id = tokenizer.token_to_id(special.eos) if special.eos else None
        self._table = _byte_table(spec, tokenizer)

    def without_ids_from(self, limit: int) -> FastTokenizer | None:
        """Return the tokenizer without the added tokens whose ids are ``limit`` or more; None if others are, too.

        A text model may share its tokenizer with one that sees images, and lack the rows of their tokens.
        """
        spec = json.loads(self._tokenizer.to_str())
        added = {token["id"] for token in spec["added_tokens"]}
        ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        if max(ids, default=0) >= limit or not any(i >= limit for i in added):
            return None
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < limit]
        return FastTokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), self.special)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, unused ones between others included."""
        return len(self._table)

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of control tokens, left out of text unless asked for."""
        return self._special_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokenizer's own end tokens."""
        return self.special.eos_ids | (frozenset() if self._eos_id is None else {self._eos_id})

    @property
    def begin_ids(self) -> list[int]:
        """Return what is put in front of every text: the begin token, or nothing."""
        first = self.encode("")[:1]
        return first if first == [self._bos_id] else []

    def token_bytes(self) -> Sequence[bytes]:
        """Return [vocab_size] the true bytes of each id; a control token's are its spelling."""
        return self._table

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the ids of ``text``.

        A begin token that the text already spells is not put there twice.

        Args:
            parse_special: control tokens spelt in the text become their ids.
            add_special: put the begin token in front where the model wants one.

        Raises:
            InvalidParameter: the text is not Unicode (a lone surrogate).
        """
        own = self.special.add_bos is None and add_special
        ids = self._ids(self._tokenizer if parse_special else self._plain, text, add_special=own)
        if add_special and not own:
            ids = self._wrap(ids)
        spelt = parse_special and self._bos_id is not None and text.startswith(self.special.bos)
        if spelt and add_special and _count_first(ids) > _count_spelt(text, self.special.bos):
            del ids[0]
        return ids

    def encode_pieces(self, pieces: Sequence[str | ControlToken]) -> list[int]:
        """Return the ids of plain text with control tokens in between, nothing added.

        The ids are those of encoding the whole, except that the text's own characters never form control tokens.

        Raises:
            InvalidParameter: the text is not Unicode (a lone surrogate).
        """
        controls = [piece.id for piece in pieces if isinstance(piece, ControlToken)]
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if any(_GUARD in text for text in texts):
            return [i for piece in pieces for i in self._piece(piece)]
        joined = "".join(_GUARD if isinstance(piece, ControlToken) else piece for piece in pieces)
        upcoming = iter(controls)
        ids = self._ids(self._plain, joined, add_special=False)
        return [next(upcoming) if i == self._guard_id else i for i in ids]

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches control tokens, the longest where several start."""
        spellings = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def _piece(self, piece: str | ControlToken) -> list[int]:
        if isinstance(piece, ControlToken):
            return [piece.id]
        # The guard itself was typed: encode around it, each side on its own.
        parts = [self._ids(self._plain, part, add_special=False) for part in piece.split(_GUARD)]
        typed = self._ids(self._tokenizer, _GUARD, add_special=False)
        return [i for n, part in enumerate(parts) for i in ((typed if n else []) + part)]

    def _ids(self, tokenizer: tokenizers.Tokenizer, text: str, *, add_special: bool) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=add_special).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameter(
                "prompt is not valid Unicode: it holds half of a surrogate pair; send it as UTF-8", param="prompt"
            ) from error

    def _wrap(self, ids: list[int]) -> list[int]:
        if self.special.add_bos and self._bos_id is not None:
            ids = [self._bos_id, *ids]
        if self.special.add_eos and self._eos_id is not None:
            ids = [*ids, self._eos_id]
        return ids


def _count_first(ids: list[int]) -> int:
    """Return how often the first id is repeated at the start."""
    return next((n for n, i in enumerate(ids) if i != ids[0]), len(ids))


def _count_spelt(text: str, token: str) -> int:
    """Return how often ``text`` starts with ``token``."""
    count = 0
    while text.startswith(token, count * len(token)):
        count += 1
    return count


def _control_tokens(spec: dict[str, Any]) -> list[ControlToken]:
    found = []
    for token in spec["added_tokens"]:
        text = token["content"]
        steers = _MARKUP.fullmatch(text) and not _HTML.fullmatch(text) and not _BYTE_TOKEN.fullmatch(text)
        if text and (token["special"] or steers):
            found.append(ControlToken(token["id"], text, token["special"], token["lstrip"], token["rstrip"]))
    return found


def _plain_variant(spec: dict[str, Any], controls: set[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer that reads control spellings as text, and knows the guard.

    The library skips tokens flagged special when told to; the flag is set on every control token here.
    """
    added = [{**token, "special": token["content"] in controls} for token in spec["added_tokens"]]
    plain = tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": added}))
    plain.encode_special_tokens = True
    plain.add_tokens([tokenizers.AddedToken(_GUARD, normalized=False, special=False)])
    return plain


def _byte_table(spec: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of each id.

    Raises:
        TokenizerError: the tokenizer is neither byte-level, nor SentencePiece-like, nor of whole words.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    kinds = set(_types_within(spec["decoder"])) | set(_types_within(spec["pre_tokenizer"]))
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif kinds & {"Metaspace", "ByteFallback", "Replace", "Fuse"}:
        convert = _sentencepiece
    elif spec["decoder"] is None and spec["model"]["type"] == "WordLevel":
        convert = _word
    else:
        named = ", ".join(sorted(kinds)) or "none"
        allowed = "ByteLevel, Metaspace / ByteFallback, or whole words"
        raise TokenizerError(f"tokenizer.json has decoder {named}; allowed: {allowed}")
    for text, i in vocab.items():
        table[i] = convert(text)
    for token in spec["added_tokens"]:
        pieces = convert is _sentencepiece and not token["special"]  # runs of spaces, among others
        table[token["id"]] = _sentencepiece(token["content"]) if pieces else token["content"].encode()
    return table


def _word(text: str) -> bytes:
    """Return a whole word's bytes; without a decoder nothing says more than that words stand apart."""
    return f" {text}".encode()


def _types_within(node: Any) -> list[str]:
    """Return the types of a component and of those nested in it."""
    if isinstance(node, list):
        return [kind for item in node for kind in _types_within(item)]
    if not isinstance(node, dict):
        return []
    own = [node["type"]] if isinstance(node.get("type"), str) else []
    return own + [kind for key in ("decoders", "pretokenizers") for kind in _types_within(node.get(key))]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable ones stand for themselves, others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in text)
    except KeyError:  # not made of bytes: a token that was added as it is
        return text.encode(errors="replace")


def _sentencepiece(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode(errors="replace")
