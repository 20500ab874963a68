"""Tokenizers made of SentencePiece pieces, whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # types of pieces; GGUF has the same
SPACE = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The vocabulary and the normalisation of a SentencePiece model.

    Attributes:
        texts: [vocab] with U+2581 for a space and <0xNN> for bytes.
        scores: [vocab] higher merges earlier, or is likelier.
        kinds: [vocab] types, such as CONTROL.
        prefix_space: a space is put before the text.
        collapse_spaces: spaces at the ends are dropped, several become one.
        charsmap: SentencePiece's compiled rules of characters, b"" for none.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    prefix_space: bool = True
    collapse_spaces: bool = False
    charsmap: bytes = b""

    @property
    def unknown(self) -> int | None:
        """Return the id of the unknown token."""
        return next((i for i, kind in enumerate(self.kinds) if kind == UNKNOWN), None)

    def bpe(self) -> Tokenizer:
        """Build the BPE that merges as SentencePiece does: the pair whose result has the best score first."""
        texts = self._spelt()
        vocab = {text: i for i, text in enumerate(texts)}
        unknown = self.unknown
        model = models.BPE(
            vocab=vocab,
            merges=ranked_merges(vocab, [-score for score in self.scores]),
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        return self._complete(Tokenizer(model))

    def unigram(self) -> Tokenizer:
        """Build the tokenizer that takes the likeliest of all ways to cut a text."""
        # Tokens that text cannot spell are far too unlikely to be taken; those that users defined always are.
        scored = [
            (text, -1e6 if kind in (UNKNOWN, CONTROL, BYTE) else score)
            for text, score, kind in zip(self._spelt(), self.scores, self.kinds, strict=True)
        ]
        return self._complete(Tokenizer(models.Unigram(scored, self.unknown, BYTE in self.kinds)))

    def _complete(self, tokenizer: Tokenizer) -> Tokenizer:
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.collapse_spaces:
            steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.prefix_space:
            steps.append(normalizers.Prepend(SPACE))
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        tail = [decoders.Strip(" ", 1, 0)] if self.prefix_space else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
        )
        # Normalised, they are found where a text has their spaces; but then a space before the text is put before them.
        add_typed_tokens(tokenizer, self._spelt(), self.kinds, normalized=not self.prefix_space)
        return tokenizer

    def _spelt(self) -> list[str]:
        """Return the pieces; of what users defined, runs of spaces among them, some files write spaces as they look."""
        before, after = (SPACE, " ") if self.prefix_space else (" ", SPACE)
        return [
            text.replace(before, after) if kind == USER_DEFINED else text
            for text, kind in zip(self.texts, self.kinds, strict=True)
        ]


def ranked_merges(vocab: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to a token, the one with the lowest rank [vocab] first."""
    ranked = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((ranks[i], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def add_typed_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[int], *, normalized: bool = False
) -> None:
    """Mark control and user-defined tokens by their types.

    Args:
        normalized: look for those that users defined in the normalised text.
    """

    def of(*wanted: int) -> list[str]:
        return [text for text, kind in zip(texts, kinds, strict=True) if kind in wanted]

    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in of(UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in of(USER_DEFINED)])
