"""The rules that cut text into words before byte-level BPE merges within them, by name."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIX"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class WordRule:
    """One way to cut text.

    Attributes:
        pattern: of a word; "" for GPT-2's.
        digits: digits are cut apart first.
        whole_words: a word that is a token is taken as it is, whatever merges there are.
        nfc: text is composed first.
        adds_bos: texts begin with the begin token unless the file says otherwise.
    """

    pattern: str = ""
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the step that cuts."""
        if self.pattern:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.digits:
            return words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])

    def tokenizer(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
        """Return the byte-level BPE that merges within such words."""
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=self.whole_words))
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer


_THREES = _CONTRACTIONS + "|" + _WORD + r"|\p{N}{1,3}|" + _TAIL
GPT2 = WordRule()
DIGITS = WordRule(digits=True)
LLAMA3 = WordRule(_THREES, whole_words=True, adds_bos=True)
QWEN2 = WordRule(_CONTRACTIONS + "|" + _WORD + r"|\p{N}|" + _TAIL, nfc=True)
_ONES = WordRule(QWEN2.pattern)
_GPT4 = WordRule(_THREES)
_TEKKEN = WordRule(_CASED.replace("SUFFIX", "") + r"|\p{N}|" + _CASED_TAIL, whole_words=True, adds_bos=True)
_GPT4O = WordRule(_CASED.replace("SUFFIX", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _CASED_TAIL)

# tokenizer.ggml.pre
GGUF_RULES = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    **dict.fromkeys(("stablelm2", "megrez"), _ONES),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
# the stem of a file of ranks
RANK_RULES = {
    "qwen": WordRule(QWEN2.pattern, whole_words=True, nfc=True),
    "cl100k_base": WordRule(_THREES, whole_words=True),
    "o200k_base": WordRule(_GPT4O.pattern, whole_words=True),
    "r50k_base": WordRule(whole_words=True),
    "p50k_base": WordRule(whole_words=True),
    "gpt2": WordRule(whole_words=True),
    "tokenizer": LLAMA3,  # Llama 3 as its publisher hands it out
}
