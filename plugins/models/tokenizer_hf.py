"""The tokenizer of a Hugging Face folder: tokenizer.json, a SentencePiece tokenizer.model, or a file of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from slotline.errors import CheckpointError, TokenizerError
from slotline.plugins.models.ranks import SUFFIX, is_rank_file, tokenizer_from_ranks
from slotline.plugins.models.sentencepiece import tokenizer_from_sentencepiece
from slotline.plugins.models.tensor_files import read_json
from slotline.plugins.models.tokenizer import FastTokenizer, SpecialTokens


def tokenizer_from_folder(folder: Path) -> FastTokenizer:
    """Open the tokenizer of a folder.

    Raises:
        TokenizerError: there is none, or it is damaged or of an unknown kind.
    """
    config = _config(folder)
    tokenizer, complete = _tokenizer(folder)
    _add_tokens(tokenizer, config)
    special = SpecialTokens(
        bos=_spelling(config, "bos_token"),
        eos=_spelling(config, "eos_token"),
        # The post-processor of tokenizer.json knows; transformers 5 reads these flags without one only, too.
        add_bos=None if complete else _flag(config, "add_bos_token", True),
        add_eos=None if complete else _flag(config, "add_eos_token", False),
    )
    for name, text in (("bos_token", special.bos), ("eos_token", special.eos)):
        if text and tokenizer.token_to_id(text) is None:
            raise TokenizerError(f"tokenizer_config.json: {name} is {text!r:.80}, which is no token of the tokenizer")
    return FastTokenizer(tokenizer, special)


def _tokenizer(folder: Path) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether it is complete with its post-processor."""
    fast, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if fast.is_file():
        try:
            return Tokenizer.from_file(str(fast)), True
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{fast} cannot be read: {error}; fetch it again") from error
    ranks = sorted(folder.glob(f"*{SUFFIX}"))
    if pieces.is_file():
        return (tokenizer_from_ranks if is_rank_file(pieces) else tokenizer_from_sentencepiece)(pieces), False
    if ranks:
        return tokenizer_from_ranks(ranks[0]), False
    raise TokenizerError(
        f"{folder} has no tokenizer; expected tokenizer.json, tokenizer.model or *{SUFFIX} beside the weights"
    )


def _config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, completed from the older special_tokens_map.json."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                values = read_json(folder / name)
            except CheckpointError as error:
                raise TokenizerError(error.message) from error
            merged.update({key: value for key, value in values.items() if value is not None})
    return merged


def _spelling(config: dict[str, Any], key: str) -> str:
    """Return a token given as its text, or as an object with ``content``."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return ""
    if not isinstance(text, str):
        raise TokenizerError(f"tokenizer_config.json: {key} is {value!r:.80}; allowed: a token's text")
    return text


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"tokenizer_config.json: {key} is {value!r:.80}; allowed: true or false")
    return value


def _add_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks, in the order of their ids.

    Raises:
        TokenizerError: one of them would not get the id that the file gives it.
    """
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    missing = []
    for key, entry in listed.items():
        if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder holds {key!r:.40}: {entry!r:.80}; fetch it again"
            )
        if tokenizer.token_to_id(entry["content"]) is None:
            missing.append((int(key), entry))
    for wanted, entry in sorted(missing, key=lambda pair: pair[0]):
        options = {
            name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
        }
        tokenizer.add_tokens([AddedToken(entry["content"], **options)])
        got = tokenizer.token_to_id(entry["content"])
        if got != wanted:
            raise TokenizerError(
                f"tokenizer_config.json gives token {entry['content']!r:.40} the id {wanted}, after tokenizer.json "
                f"it gets {got}; the files are of different models"
            )
