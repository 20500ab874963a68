"""Read a SentencePiece tokenizer.model: a small protobuf message, of which a few fields matter."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from slotline.errors import TokenizerError
from slotline.plugins.models.pieces import Pieces

_NORMAL = 1
_UNIGRAM, _BPE = 1, 2
# Field numbers of ModelProto and of what it nests.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX = 3, 24
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4


def tokenizer_from_sentencepiece(path: Path) -> Tokenizer:
    """Convert a tokenizer.model of the BPE or the unigram kind.

    Raises:
        TokenizerError: the file is damaged or of another kind.
    """
    try:
        kind, pieces = _parsed(path.read_bytes())
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is damaged or not a SentencePiece model: {error}; fetch it again") from error
    if kind not in (_UNIGRAM, _BPE) or not pieces.texts or pieces.unknown is None:
        raise TokenizerError(
            f"{path} is not a SentencePiece model of the BPE or the unigram kind; convert it to tokenizer.json"
        )
    return pieces.bpe() if kind == _BPE else pieces.unigram()


def _parsed(data: bytes) -> tuple[int, Pieces]:
    """Return the kind of model, and its vocabulary and normalisation."""
    listed: list[dict[int, int | bytes]] = []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            listed.append(dict(_fields(_bytes(value))))
        elif number == _TRAINER:
            trainer = dict(_fields(_bytes(value)))
        elif number == _NORMALIZER:
            rules = dict(_fields(_bytes(value)))
    if _integer(trainer.get(_SPACE_AS_SUFFIX, 0)):
        raise ValueError("it puts spaces behind words, which is not supported")
    pieces = Pieces(
        texts=[_bytes(piece[_PIECE_TEXT]).decode() for piece in listed],
        scores=[struct.unpack("<f", _bytes(piece.get(_PIECE_SCORE, bytes(4))))[0] for piece in listed],
        kinds=[_integer(piece.get(_PIECE_TYPE, _NORMAL)) for piece in listed],
        prefix_space=bool(_integer(rules.get(_DUMMY_PREFIX, 1))),
        collapse_spaces=bool(_integer(rules.get(_REMOVE_SPACES, 1))),
        charsmap=_bytes(rules.get(_CHARSMAP, b"")),
    )
    return _integer(trainer.get(_MODEL_TYPE, _UNIGRAM)), pieces


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; values are integers or bytes.

    Raises:
        ValueError: the bytes are no such message.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        length, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}.get(wire, -1), at)
        if length < 0 or at + length > len(data):
            raise ValueError(f"field {number} runs past the end")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number is too long")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes expected")
    return value


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number expected")
    return value
