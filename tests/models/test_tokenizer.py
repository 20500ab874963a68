"""Ids equal those of the model's own tokenizer, and bytes are the true ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.errors import InvalidParameter, TokenizerError
from slotline.plugins.models.tokenizer import ControlToken, FastTokenizer, SpecialTokens
from slotline.plugins.models.tokenizer_gguf import tokenizer_from_gguf
from slotline.plugins.models.tokenizer_hf import tokenizer_from_folder
from slotline.text import Vocabulary

spelt = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "end|>", " ", "\n", "don't", "é", "🦙", "12", "  x"])
)


def bytes_of(tokenizer, ids) -> bytes:
    return b"".join(tokenizer.token_bytes()[i] for i in ids)


# SmolLM2

# Bytes that its vocabulary lacks; its own tokenizer drops them from text, too.
SMOLLM2_LACKS = bytes.fromhex("04061314161dc0c1f1f2") + bytes(range(0xF5, 0x100))


def writable(text: str) -> bytes:
    return bytes(byte for byte in text.encode() if byte not in SMOLLM2_LACKS)


def test_smollm2_lacks_these_bytes(smollm2):
    single = {spelling for spelling in smollm2.tokenizer.token_bytes() if len(spelling) == 1}
    assert {bytes([byte]) for byte in range(256)} - single == {bytes([byte]) for byte in SMOLLM2_LACKS}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("12345", [33, 34, 35, 36, 37]),
        ("naïve café", [3546, 46494, 37366]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("don't stop", [12420, 982, 2853]),
        ("  leading", [216, 2899]),
        ("trailing  ", [4861, 4966, 256]),
        ("<|im_end|>", [2]),
        ("def f(x):\n    return x**2\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("🦙", [10813, 116, 243]),
        ("", []),
    ],
)
def test_reference_ids(smollm2, text, ids):
    assert smollm2.tokenizer.encode(text) == ids


@pytest.mark.parametrize(("text", "count"), [("Here is the English alphabet: ABC", 7), ("1, 2, 3, 4, 5, 6,", 17)])
def test_reference_counts(smollm2, text, count):
    assert len(smollm2.tokenizer.encode(text)) == count


@pytest.mark.parametrize(
    ("ids", "spelling"),
    [
        ([49], b"A"),
        ([260], b" the"),
        ([198], b"\n"),
        ([1116], b"\n\n"),
        ([42], b":"),
        ([143], b"\xc4"),
        ([10813], b"\xf0\x9f"),
        ([143, 233], "ď".encode()),
        ([26411], " é".encode()),
        ([2], b"<|im_end|>"),
    ],
)
def test_reference_bytes(smollm2, ids, spelling):
    table = smollm2.tokenizer.token_bytes()
    assert b"".join(table[i] for i in ids) == spelling


def test_tables_cover_the_vocabulary(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == len(tokenizer.token_bytes()) == smollm2.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert all(tokenizer.token_bytes())


@settings(max_examples=2000)
@given(text=st.text(max_size=60) | spelt.map("".join))
def test_smollm2_ids_equal_transformers(smollm2, smollm2_theirs, text):
    ids = smollm2.tokenizer.encode(text)
    assert ids == smollm2_theirs.encode(text)
    assert bytes_of(smollm2.tokenizer, ids) == writable(text)


@given(text=st.text() | spelt.map("".join))
def test_plain_text_holds_no_control_tokens(smollm2, text):
    ids = smollm2.tokenizer.encode(text, parse_special=False)
    assert not smollm2.tokenizer.special_ids & set(ids)
    assert bytes_of(smollm2.tokenizer, ids) == writable(text)


@given(parts=st.lists(st.text(max_size=8) | st.sampled_from(["<|im_end|>", "<|im_start|>", "\ufdd0"]), max_size=6))
def test_pieces_equal_the_whole(smollm2, parts):
    """Control tokens between texts without any give the ids of parsing the joined text."""
    tokenizer = smollm2.tokenizer
    whole = tokenizer.encode("".join(parts))
    assert tokenizer.encode_pieces([tokenizer.controls.get(part, part) for part in parts]) == whole


def test_many_threads(smollm2):
    expected = smollm2.tokenizer.encode("The quick brown fox <|im_end|>" * 50)
    with ThreadPoolExecutor(8) as pool:
        plain = pool.map(lambda _: smollm2.tokenizer.encode("<|im_end|>" * 50, parse_special=False), range(50))
        found = pool.map(lambda _: smollm2.tokenizer.encode("The quick brown fox <|im_end|>" * 50), range(50))
        assert all(ids == expected for ids in found) and not any(2 in ids for ids in plain)


@pytest.mark.parametrize("parse_special", [True, False])
def test_half_a_surrogate_pair(smollm2, parse_special):
    with pytest.raises(InvalidParameter, match="surrogate") as caught:
        smollm2.tokenizer.encode("a\ud800b", parse_special=parse_special)
    assert caught.value.param == "prompt"


# tokenizer.json


@pytest.fixture
def folder(tmp_path, tiny_tokenizer, edit_json):
    tiny_tokenizer.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|im_end|>")
    return tmp_path


@pytest.fixture(scope="session")
def tiny_pair(tiny_tokenizer):
    """The tiny tokenizer, ours and transformers'."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    copy = Tokenizer.from_str(tiny_tokenizer.to_str())
    ours = FastTokenizer(copy, SpecialTokens(bos="<|im_start|>", eos="<|im_end|>"))
    return ours, PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer)


@settings(max_examples=2000)
@given(text=st.text(max_size=60) | spelt.map("".join))
def test_tiny_ids_equal_transformers(tiny_pair, text):
    ours, theirs = tiny_pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert bytes_of(ours, ids) == text.encode()


FIRST = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
LAST = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}


def processor(*single):
    """Spell a post-processor that puts tokens around a text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}} if item is None else item for item in single],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]}
            for i, token in enumerate(["<|im_start|>", "<|im_end|>"])
        },
    }


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("own", [True, False], ids=["post-processor", "none"])
def test_begin_token(folder, edit_json, add_bos, own):
    """The post-processor says whether there is one, whatever tokenizer_config.json says; transformers agrees."""
    from transformers import PreTrainedTokenizerFast

    if own:
        edit_json(folder / "tokenizer.json", post_processor=processor(FIRST, None))
    edit_json(folder / "tokenizer_config.json", add_bos_token=add_bos)
    ids = tokenizer_from_folder(folder).encode("the dog")
    assert (ids[0] == 0) is own
    assert ids == PreTrainedTokenizerFast.from_pretrained(folder).encode("the dog")
    assert 0 not in tokenizer_from_folder(folder).encode("the dog", add_special=False)


@pytest.mark.parametrize("text", ["<|im_start|>the dog", "the dog", "", "<|im_start|><|im_start|>the"])
def test_begin_token_is_not_doubled(folder, edit_json, text):
    edit_json(folder / "tokenizer.json", post_processor=processor(FIRST, None))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode(text).count(0) == max(1, text.count("<|im_start|>"))
    assert tokenizer.encode(text, add_special=False).count(0) == text.count("<|im_start|>")
    assert tokenizer.encode(text, parse_special=False).count(0) == 1


def test_end_token_where_the_model_wants_one(folder, edit_json):
    edit_json(folder / "tokenizer.json", post_processor=processor(FIRST, None, LAST))
    ids = tokenizer_from_folder(folder).encode("<|im_start|>dog")
    assert (ids[0], ids[-1], ids.count(0)) == (0, 1, 1)


def test_tokens_of_the_config_are_added(folder, edit_json):
    added = {"300": {"content": "<|tool|>", "special": True}, "301": {"content": "<think>", "special": False}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("<|tool|><think>") == [300, 301]
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (302, {0, 1, 300})
    assert not {300, 301} & set(tokenizer.encode("<|tool|><think>", parse_special=False))


def test_added_words_and_html_stay_tokens_of_plain_text(folder, edit_json):
    added = {str(300 + n): {"content": text} for n, text in enumerate(["    ", "<h1>", "</table>", "<tool_call>"])}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    ids = tokenizer_from_folder(folder).encode("    <h1></table><tool_call>", parse_special=False)
    assert ids[:3] == [300, 301, 302] and 303 not in ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"added_tokens_decoder": {"400": {"content": "<|x|>"}}}, "'<|x|>' the id 400"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder holds 'x'"),
        ({"bos_token": 5}, "bos_token is 5"),
        ({"eos_token": "</s>"}, "eos_token is '</s>', which is no token"),
    ],
)
def test_a_config_that_does_not_fit(folder, edit_json, changes, words):
    edit_json(folder / "tokenizer_config.json", **changes)
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_folder(folder)
    assert words in caught.value.message


def test_older_files_name_special_tokens_apart(folder, edit_json):
    edit_json(folder / "tokenizer_config.json", bos_token=None, eos_token=None)
    edit_json(folder / "special_tokens_map.json", bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.special.bos, tokenizer.eos_ids) == ("<|im_start|>", {1})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_damaged_files(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(TokenizerError, match=name):
        tokenizer_from_folder(folder)


def test_a_tokenizer_without_bytes(folder, edit_json):
    edit_json(folder / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    edit_json(folder / "tokenizer.json", pre_tokenizer={"type": "BertPreTokenizer"})
    with pytest.raises(TokenizerError, match="BertPreTokenizer, WordPiece"):
        tokenizer_from_folder(folder)


def test_truncation_of_the_file_is_not_applied(folder, edit_json):
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit_json(folder / "tokenizer.json", truncation=limit)
    assert len(tokenizer_from_folder(folder).encode("the quick brown fox " * 10)) > 40


# SentencePiece


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "h", "e", "l", "o", "w", "r", "d", "▁h"]
PIECES += ["el", "lo", "hel", "▁hel", "▁hello", "or", "▁w", "▁wor", "ld", "▁world", "<mask>"]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 260), 4]
SCORES = [0.0] * 259 + [-float(n) for n in range(len(PIECES) - 259)]


def gguf_metadata(**changes):
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def spelt_out(tokenizer, ids):
    return [tokenizer.token_bytes()[i] for i in ids]


def test_sentencepiece_from_gguf():
    tokenizer = tokenizer_from_gguf(gguf_metadata(), "m.gguf")
    assert tokenizer.encode("")[0] == 1, "Llama begins with <s>"
    assert spelt_out(tokenizer, tokenizer.encode("hello world", add_special=False)) == [b" hello", b" world"]
    assert spelt_out(tokenizer, tokenizer.encode("hel wold", add_special=False)) == [b" hel", b" w", b"o", b"ld"]
    assert spelt_out(tokenizer, tokenizer.encode("é", add_special=False)) == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.encode("</s>", add_special=False) == [2]
    assert 2 not in tokenizer.encode("</s>", add_special=False, parse_special=False)
    assert tokenizer.special_ids == {0, 1, 2}


def test_sentencepiece_without_a_leading_space():
    tokenizer = tokenizer_from_gguf(gguf_metadata(**{"tokenizer.ggml.add_space_prefix": False}), "m.gguf")
    assert spelt_out(tokenizer, tokenizer.encode("hello", add_special=False)) == [b"hel", b"lo"]


@pytest.mark.parametrize("scheme", ["normalizer", "first", "always", "never"])
def test_sentencepiece_pieces_equal_the_whole(scheme):
    """Whether a space is put before the text, before each piece or not at all is the tokenizer's to say."""
    import json

    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = tokenizer_from_gguf(gguf_metadata(), "m.gguf")
    if scheme != "normalizer":
        changed = Tokenizer.from_str(json.dumps({**json.loads(tokenizer._tokenizer.to_str()), "normalizer": None}))
        changed.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer = FastTokenizer(changed, tokenizer.special)
    end = tokenizer.controls["</s>"]
    for pieces in (["hello", end, "world"], [end, "hello"], ["hello ", end, end, " world"], [end], ["hello"]):
        text = "".join(piece if isinstance(piece, str) else piece.spelling for piece in pieces)
        assert tokenizer.encode_pieces(pieces) == tokenizer.encode(text, add_special=False)


def protobuf(number: int, value: bytes | int) -> bytes:
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_model(model_type: int = 2, prefix: int = 1) -> bytes:
    import struct

    data = b""
    for text, score, kind in zip(PIECES, SCORES, KINDS, strict=True):
        piece = protobuf(1, text.encode()) + b"\x15" + struct.pack("<f", score) + protobuf(3, kind)
        data += protobuf(1, piece)
    return data + protobuf(2, protobuf(3, model_type)) + protobuf(3, protobuf(3, prefix) + protobuf(4, 0))


def test_sentencepiece_model_equals_gguf(tmp_path, edit_json):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<s>", eos_token="</s>")
    ours, theirs = tokenizer_from_folder(tmp_path), tokenizer_from_gguf(gguf_metadata(), "m.gguf")
    for text in ("hello world", "  hello  ", "é</s>x", "<mask>", ""):
        assert ours.encode(text) == theirs.encode(text)


def test_sentencepiece_begin_and_end_tokens(tmp_path, edit_json):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    edit_json(
        tmp_path / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", add_bos_token=False, add_eos_token=True
    )
    assert tokenizer_from_folder(tmp_path).encode("h") == [PIECES.index("▁h"), 2]
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token="yes")
    with pytest.raises(TokenizerError, match="add_bos_token is 'yes'"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x7f", sentencepiece_model(model_type=3), b""])
def test_other_sentencepiece_files_are_refused(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 123's", ["ab", " 123", "'s"]),
        ("smollm", "ab 123's", ["ab", " ", "1", "2", "3", "'s"]),
        ("llama-bpe", "ab 12345\n\nC'S", ["ab", " ", "123", "45", "\n\n", "C", "'S"]),
        ("qwen2", "ab 123\n\nC'S", ["ab", " ", "1", "2", "3", "\n\n", "C", "'S"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(pre, text, words):
    from slotline.plugins.models.words import GGUF_RULES

    cut = [part for part, _ in GGUF_RULES[pre].pre_tokenizer().pre_tokenize_str(text)]
    assert [part.replace("Ġ", " ").replace("Ċ", "\n") for part in cut] == words


def test_white_space_around_control_tokens(folder, edit_json):
    added = {"300": {"content": "<|a|>", "special": True, "rstrip": True, "lstrip": True}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    token = tokenizer_from_folder(folder).controls["<|a|>"]
    assert token == ControlToken(300, "<|a|>", special=True, lstrip=True, rstrip=True)


def test_a_tokenizer_of_whole_words(tmp_path):
    """One word an id, no decoder, as benchmarks make them: words stand apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(20)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "t2", "unk_token": "t0"}')
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("t5 t7 nonsense") == [5, 7, 0]
    assert Vocabulary(tokenizer).decode([5, 7]) == " t5 t7"
