"""Ids of thousands of random texts equal those of the reference: transformers, SentencePiece, tiktoken."""

import base64
import io
import json
import random
import unicodedata

import pytest

from slotline.errors import TokenizerError
from slotline.plugins.models.tokenizer_gguf import tokenizer_from_gguf
from slotline.plugins.models.tokenizer_hf import tokenizer_from_folder

COUNT, MANY = 2_000, 10_000
SAMPLE = """
The quick brown fox don't can't I'LL it's '\u017f naïve café Ünïcödé straße ПРИВЕТ мир 日本語 テスト 한국어 עברית हिन्दी
x**2 f(x): 1234567 3.14 a_b -- ... 😀 👩\u200d👩\u200d👧 e\u0301 ﬁ ① ½ <|im_end|> <b> ▁
"""
WORDS = SAMPLE.split()
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\u00a0", "\u3000", ""]
# Letters of many scripts, marks, digits, symbols, emoji, controls; nothing so new that tables differ between libraries.
RANGES = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x52F), (0x5D0, 0x5EB), (0x620, 0x650), (0x905, 0x93A)]
RANGES += [(0xE01, 0xE3B), (0x2010, 0x2030), (0x2190, 0x2200), (0x3041, 0x3097), (0x4E00, 0x4F00), (0xAC00, 0xAD00)]
RANGES += [(0xFF01, 0xFF5F), (0x1F600, 0x1F640), (0x1D400, 0x1D450), (0x1, 0x20), (0xE000, 0xE010)]


def texts(count: int) -> list[str]:
    rng = random.Random(0)

    def part() -> str:
        if rng.random() < 0.5:
            return rng.choice(WORDS)
        low, high = rng.choice(RANGES)
        return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 8)))

    return ["".join(part() + rng.choice(SPACES) for _ in range(rng.randrange(1, 9))) for _ in range(count)]


CORPUS = [" ".join(random.Random(n).choices(WORDS, k=12)) for n in range(600)] + texts(600)
LENGTHS = [pytest.param(COUNT, id="2000"), pytest.param(MANY, id="10000", marks=pytest.mark.long)]


def bytes_of(tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes()[i] for i in ids)


@pytest.mark.parametrize("count", LENGTHS)
def test_smollm2(smollm2, smollm2_theirs, count):
    ours = smollm2.tokenizer
    for text in texts(count):
        assert ours.encode(text) == smollm2_theirs.encode(text), repr(text)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_gemma3(gemma3, gemma3_theirs):
    ours = gemma3.tokenizer
    for text in texts(MANY):
        ids = ours.encode(text)
        assert ids == gemma3_theirs.encode(text), repr(text)
        assert bytes_of(ours, ids[1:]) == text.replace("▁", " ").encode()


# SentencePiece


@pytest.fixture(scope="session", params=["bpe", "unigram", "unigram, composed"])
def sentencepiece(request, tmp_path_factory):
    """A model trained on the spot: the library's own processor, and ours from its file."""
    import sentencepiece as spm

    kind, _, variant = request.param.partition(", ")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in CORPUS if text.strip()),
        model_writer=model,
        vocab_size=1500,
        model_type=kind,
        byte_fallback=not variant,
        normalization_rule_name="nmt_nfkc" if variant else "identity",
        remove_extra_whitespaces=bool(variant),
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = spm.SentencePieceProcessor(model_proto=model.getvalue())
    return theirs, tokenizer_from_folder(folder), request.param


@pytest.mark.parametrize("count", LENGTHS)
def test_sentencepiece(sentencepiece, count):
    theirs, ours, kind = sentencepiece
    for text in texts(count):
        if kind == "unigram, composed":  # the tokenizers library composes a mark with a space before it otherwise
            text = "".join(char for char in text if unicodedata.category(char)[0] not in "MC" or char == "\n")  # noqa: PLW2901
        ids = ours.encode(text, add_special=False, parse_special=False)
        assert ids == theirs.encode(text), repr(text)
        if kind == "bpe" and text and "▁" not in text:
            assert bytes_of(ours, ids) == b" " + text.encode(), repr(text)
    assert ours.encode("quick") == [1, *theirs.encode("quick")], "with the begin token in front"


def test_unigram_from_gguf(sentencepiece):
    """llama.cpp's name for the kind is t5."""
    theirs, _, kind = sentencepiece
    if kind != "unigram":
        pytest.skip("not of this kind")
    size = theirs.get_piece_size()
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": 2,
    }
    ours = tokenizer_from_gguf(metadata, "m.gguf")
    for text in texts(200):
        assert ours.encode(text, parse_special=False) == theirs.encode(text), repr(text)


# Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Return a function that writes a file of ranks under a name: tiktoken's own encoder, and ours from the file."""
    import tiktoken
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from slotline.plugins.models.tokenizer import byte_alphabet

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = byte_alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda pair: (len(pair[0]) > 1, pair[1]))
    mergeable = {bytes(alphabet[char] for char in token): rank for rank, (token, _) in enumerate(vocab)}

    def make(name: str, pattern: str, controls: list[str]):
        folder = tmp_path_factory.mktemp("ranks")
        lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in mergeable.items()]
        (folder / name).write_text("".join(lines))
        special = {text: len(mergeable) + n for n, text in enumerate(controls)}
        theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=mergeable, special_tokens=special)
        return theirs, tokenizer_from_folder(folder)

    return make


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RANK_FILES = {
    "qwen.tiktoken": (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL, ["<|endoftext|>", "<|im_start|>"]),
    "tokenizer.model": (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL, ["<|begin_of_text|>"]),
    "gpt2.tiktoken": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", []),
}


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", RANK_FILES)
def test_ranks(ranks, name, count):
    theirs, ours = ranks(name, *RANK_FILES[name])
    for text in texts(count):
        # Qwen's own code composes the text before it hands it to tiktoken.
        composed = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text
        ids = ours.encode(text, add_special=False, parse_special=False)
        assert ids == theirs.encode(composed, disallowed_special=()), repr(text)
        assert bytes_of(ours, ids) == composed.encode()
    for control in RANK_FILES[name][1]:
        assert ours.encode(control, add_special=False) == theirs.encode(control, allowed_special="all")


def test_ranks_that_cannot_be_used(tmp_path):
    file = tmp_path / "other.tiktoken"
    file.write_text("IQ== 0\n")
    with pytest.raises(TokenizerError, match=r"other\.tiktoken holds token ranks.*known by name: cl100k_base"):
        tokenizer_from_folder(tmp_path)
    for damaged in ("IQ== 0\nIg== 2\n", "IQ== 0\nIg==\n", "IQ== 0\n!! 1\n", ""):
        file.rename(tmp_path / "qwen.tiktoken").write_text(damaged)
        with pytest.raises(TokenizerError, match=r"qwen\.tiktoken is damaged"):
            tokenizer_from_folder(tmp_path)
        (tmp_path / "qwen.tiktoken").rename(file)
