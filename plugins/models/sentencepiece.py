"""Read a SentencePiece tokenizer.model: a small protobuf message, of which four fields matter."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from slotline.errors import TokenizerError
from slotline.plugins.models.tokenizer_gguf import add_typed_tokens, sentencepiece_bpe

_NORMAL, _UNKNOWN = 1, 2
_BPE = 2
# Field numbers of ModelProto and of what it nests.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE = 3
_DUMMY_PREFIX = 3


def tokenizer_from_sentencepiece(path: Path) -> Tokenizer:
    """Convert a tokenizer.model of the BPE kind.

    Raises:
        TokenizerError: the file is damaged or of another kind.
    """
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    model_type, prefix = 1, True
    try:
        for number, value in _fields(path.read_bytes()):
            if number == _PIECES:
                piece = dict(_fields(_bytes(value)))
                texts.append(_bytes(piece[_PIECE_TEXT]).decode())
                scores.append(struct.unpack("<f", _bytes(piece.get(_PIECE_SCORE, bytes(4))))[0])
                kinds.append(_integer(piece.get(_PIECE_TYPE, _NORMAL)))
            elif number == _TRAINER:
                model_type = _integer(dict(_fields(_bytes(value))).get(_MODEL_TYPE, 1))
            elif number == _NORMALIZER:
                prefix = bool(_integer(dict(_fields(_bytes(value))).get(_DUMMY_PREFIX, 1)))
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is damaged or not a SentencePiece model: {error}; fetch it again") from error
    if model_type != _BPE or not texts:
        raise TokenizerError(f"{path} is not a SentencePiece model of the BPE kind; convert it to tokenizer.json")
    unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else None
    tokenizer = sentencepiece_bpe(texts, scores, unknown=unknown, prefix_space=prefix)
    add_typed_tokens(tokenizer, texts, kinds)
    return tokenizer


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
