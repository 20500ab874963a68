"""Rebuild a tokenizer from GGUF metadata: GPT-2 style byte-level BPE, and the SentencePiece kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slotline.errors import TokenizerError
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.tokenizer import FastTokenizer, SpecialTokens

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
# tokenizer.ggml.pre to the rule that cuts text into words before merging
_RULES = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "digits",
    "starcoder": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type


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
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, kinds, where), True
    else:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama")
    add_typed_tokens(tokenizer, tokens, kinds)
    return FastTokenizer(tokenizer, _special(metadata, tokens, where, add_bos))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = _RULES.get(pre)
    if rule is None:
        raise TokenizerError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported, and guessing would give wrong ids; "
            f"known: {', '.join(sorted(_RULES))}"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise TokenizerError(f"{where} has no tokenizer.ggml.merges; convert the model again with a current converter")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(merge, vocab, where) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule == "llama3"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule == "llama3"


def _pair(merge: str, vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise TokenizerError(f"{where}: merge {merge!r} does not fit the vocabulary; the file is damaged")
    return left, right


def _pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return words
    if rule == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    split = pre_tokenizers.Split(Regex(_LLAMA3 if rule == "llama3" else _QWEN2), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{where} has no score for each token (tokenizer.ggml.scores); the file is damaged")
    unknown = next((i for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_bpe(tokens, scores, unknown=unknown, prefix_space=bool(prefix))


def sentencepiece_bpe(tokens: list[str], scores: list[float], *, unknown: int | None, prefix_space: bool) -> Tokenizer:
    """Build the BPE that merges as SentencePiece does: the pair whose result has the best score first.

    Args:
        tokens: [vocab] pieces, with U+2581 for a space and <0xNN> for bytes.
        scores: [vocab] of each piece; higher merges earlier.
        unknown: id of the unknown token.
        prefix_space: put a space before the text.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *steps] if prefix_space else steps)
    tail = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    ranked = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def add_typed_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Mark control and user-defined tokens by their SentencePiece types, which GGUF shares."""

    def of(*wanted: int, special: bool) -> list[AddedToken]:
        texts = (text for text, kind in zip(tokens, kinds, strict=True) if kind in wanted)
        return [AddedToken(text, normalized=False, special=special) for text in texts]

    tokenizer.add_special_tokens(of(_UNKNOWN, _CONTROL, special=True))
    tokenizer.add_tokens(of(_USER_DEFINED, special=False))


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
