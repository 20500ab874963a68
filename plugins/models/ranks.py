"""Read a file of token ranks, as tiktoken does: a token in base64 and its rank on each line."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from slotline.errors import TokenizerError
from slotline.plugins.models.pieces import ranked_merges
from slotline.plugins.models.tokenizer import byte_alphabet
from slotline.plugins.models.words import RANK_RULES

SUFFIX = ".tiktoken"
_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_RESERVED = [f"<|reserved_special_token_{n}|>" for n in range(251)]
# Control tokens are in the publisher's code, not in the file; they follow the last rank.
_CONTROLS = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))],
    "tokenizer": [
        *("<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:2], "<|finetune_right_pad_id|>", *_RESERVED[2:3]),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_RESERVED[3:248]),
    ],
}


def is_rank_file(path: Path) -> bool:
    """Return whether a file is one of ranks, whatever its name."""
    with path.open("rb") as file:
        return _FIRST_LINE.match(file.read(1024)) is not None


def tokenizer_from_ranks(path: Path) -> Tokenizer:
    """Convert a file of ranks; how it cuts text into words goes by its name.

    Raises:
        TokenizerError: the file is damaged, or its name is not one whose words are known.
    """
    rule = RANK_RULES.get(path.stem)
    if rule is None:
        raise TokenizerError(
            f"{path} holds token ranks, but not how text is cut into words; known by name: "
            f"{', '.join(sorted(RANK_RULES))}. Convert it to tokenizer.json"
        )
    vocab = _vocabulary(path)
    tokenizer = rule.tokenizer(vocab, ranked_merges(vocab, range(max(vocab.values()) + 1)))
    controls = _CONTROLS.get(path.stem, [])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in controls])
    return tokenizer


def _vocabulary(path: Path) -> dict[str, int]:
    """Return tokens, spelt in characters that stand for their bytes, with their ranks, which are the ids."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    vocab: dict[str, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                vocab["".join(spelling[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path} is damaged or not a file of token ranks: {error}; fetch it again") from error
    if sorted(vocab.values()) != list(range(len(vocab))) or not vocab:
        raise TokenizerError(f"{path} is damaged: its ranks are not 0 to {len(vocab) - 1}; fetch it again")
    return vocab
