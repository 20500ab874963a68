"""Rebuild a tokenizer from GGUF metadata: GPT-2 style byte-level BPE, and the SentencePiece kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from slotline.errors import TokenizerError
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.pieces import Pieces, add_typed_tokens
from slotline.plugins.models.tokenizer import FastTokenizer, SpecialTokens
from slotline.plugins.models.words import GGUF_RULES


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        TokenizerError: the file has none, or one of an unknown kind.
    """
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(model, str) or not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{where} carries no tokenizer (tokenizer.ggml.tokens); take a complete GGUF file")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise TokenizerError(f"{where}: {len(tokens)} tokens but {len(kinds)} token types; the file is damaged")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, where)
        add_typed_tokens(tokenizer, tokens, kinds)
    elif model == "llama":
        tokenizer, add_bos = _pieces(metadata, tokens, kinds, where).bpe(), True
    elif model == "t5":
        tokenizer, add_bos = _pieces(metadata, tokens, kinds, where).unigram(), False
    else:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama, t5")
    return FastTokenizer(tokenizer, _special(metadata, tokens, where, add_bos))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = GGUF_RULES.get(pre)
    if rule is None:
        raise TokenizerError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported, and guessing would give wrong ids; "
            f"known: {', '.join(sorted(GGUF_RULES))}"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise TokenizerError(f"{where} has no tokenizer.ggml.merges; convert the model again with a current converter")
    vocab = {token: i for i, token in enumerate(tokens)}
    return rule.tokenizer(vocab, [_pair(merge, vocab, where) for merge in merges]), rule.adds_bos


def _pair(merge: str, vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise TokenizerError(f"{where}: merge {merge!r} does not fit the vocabulary; the file is damaged")
    return left, right


def _pieces(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], where: str) -> Pieces:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{where} has no score for each token (tokenizer.ggml.scores); the file is damaged")
    return Pieces(
        texts=tokens,
        scores=scores,
        kinds=kinds,
        prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        collapse_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(n & 0xFF for n in metadata.get("tokenizer.ggml.precompiled_charsmap") or ()),
    )


def _special(metadata: Mapping[str, Any], tokens: list[str], where: str, add_bos: bool) -> SpecialTokens:
    fields = Fields(metadata, where, "tokenizer.ggml.")

    def spelling(key: str) -> str:
        i = fields.integer(key, None, low=0)
        if i is not None and i >= len(tokens):
            raise TokenizerError(f"{where}: tokenizer.ggml.{key} is {i}, but there are {len(tokens)} tokens")
        return "" if i is None else tokens[i]

    ends = fields.ids("eot_token_id") | fields.ids("eom_token_id")
    return SpecialTokens(
        bos=spelling("bos_token_id"),
        eos=spelling("eos_token_id"),
        add_bos=fields.flag("add_bos_token", add_bos),
        add_eos=fields.flag("add_eos_token", False),
        eos_ids=frozenset(i for i in ends if i < len(tokens)),
    )
