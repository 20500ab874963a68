"""Bytes to text: whole characters, stop strings, and nothing held longer than needed."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slotline.text import Stops, TextStream, Vocabulary

SPECIAL = {256: b"<|im_start|>", 257: b"<|im_end|>"}


class Bytes:
    """A tokenizer with one id per byte, two special tokens, and some longer pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.table = [bytes([i]) for i in range(256)] + list(SPECIAL.values()) + list(pieces)
        self.vocab_size = len(self.table)
        self.special_ids = frozenset(SPECIAL)

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self) -> list[bytes]:
        return self.table


def vocabulary(*pieces: bytes) -> Vocabulary:
    return Vocabulary(Bytes(*pieces))


def feed(pieces: list[bytes], **options) -> list[str]:
    """Feed each piece as one token; return what each push and finish gave."""
    stream = TextStream(vocabulary(*pieces), **options)
    out = [stream.push(258 + i) for i in range(len(pieces))]
    return [*out, stream.finish()]


# Vocabulary


def test_vocabulary_bytes_and_spelling():
    vocab = vocabulary("é".encode(), b"\xf0\x9f", b"")
    assert len(vocab) == 261
    assert vocab.bytes_of(65) == b"A" and vocab.spell(65) == "A"
    assert vocab.bytes_of(196) == b"\xc4" and vocab.spell(196) == "bytes:\\xc4"
    assert vocab.bytes_of(257) == b"<|im_end|>" == vocab.spell(257).encode()
    assert vocab.spell(258) == "é" and vocab.spell(259) == "bytes:\\xf0\\x9f" and vocab.spell(260) == ""
    assert vocab.special_ids == {256, 257}


@pytest.mark.parametrize("outside", [261, 10**6, -1])
def test_vocabulary_ids_beyond_the_table_have_no_bytes(outside):
    vocab = vocabulary(b"x", b"y", b"z")
    assert vocab.bytes_of(outside) == b"" and vocab.spell(outside) == ""
    assert vocab.decode([65, outside, 66]) == "AB"


def test_vocabulary_decode_skips_special_tokens_or_spells_them():
    vocab = vocabulary()
    ids = [0xC3, 257, 0xA9, 65]
    assert vocab.decode(ids) == "éA"
    assert vocab.decode(ids, skip_special_tokens=False) == "\ufffd<|im_end|>\ufffdA"


def test_pieces_are_shared_and_mark_fragments():
    vocab = vocabulary("né".encode())
    assert vocab.pieces(True) is vocab.pieces(True)
    assert vocab.pieces(True)[65] == "A" and vocab.pieces(True)[196] is None and vocab.pieces(True)[258] == "né"
    assert vocab.pieces(True)[256] == "" and vocab.pieces(False)[256] == "<|im_start|>"


def test_special_id_beyond_the_table_is_harmless():
    tokenizer = Bytes()
    tokenizer.special_ids = frozenset({256, 999})
    assert TextStream(Vocabulary(tokenizer)).push(999) == ""


# Characters


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\xa6", b"\x99", b"\xf0\x9f", b"\xa6", b"\x99"], ["", "", "🦙", "", "", "🦙", ""]),
        ([b"\xc4", b"\x8f", " é".encode()], ["", "ď", " é", ""]),
        ([b"\xc4", b"\xc4", b"\xc4"], ["", "\ufffd", "\ufffd", "\ufffd"]),
        ([b"\xf0\x9f"], ["", "\ufffd"]),
        ([b" the", b" the"], [" the", " the", ""]),
        ([b"\xf0\x9f", b"A"], ["", "\ufffdA", ""]),
        ([b"\xed", b"\xa0", b"x"], ["", "\ufffd\ufffd", "x", ""]),
        ([b"", b"\xe2\x82", b"", b"\xac"], ["", "", "", "€", ""]),
    ],
    ids=["llama", "two-bytes", "lone-leads", "cut-short", "leading-space", "broken-off", "surrogate", "empty-tokens"],
)
def test_characters_come_whole(pieces, expected):
    assert feed(pieces) == expected


def test_skipped_special_token_joins_the_bytes_around_it():
    stream = TextStream(vocabulary())
    assert [stream.push(i) for i in (0xC3, 257, 0xA9, 257)] == ["", "", "é", ""]


def test_literal_special_token_ends_an_unfinished_character():
    stream = TextStream(vocabulary(), skip_special=False)
    assert [stream.push(i) for i in (0xC3, 257, 0xA9)] == ["", "\ufffd<|im_end|>", "\ufffd"]


def test_ids_beyond_the_table_give_no_text():
    stream = TextStream(vocabulary(), stop=["no"])
    assert [stream.push(i) for i in (65, 5000, 0xC3, 5000, 0xA9)] == ["A", "", "", "", "é"]


# Stop strings


def test_stop_across_tokens_never_leaks():
    pieces = [b"DEF", b"GH", b"I", b"J"]
    assert feed(pieces, stop=["DEFGHIJ"]) == [""] * 5
    assert feed([*pieces, b"K"], stop=["DEFGHIJK"]) == [""] * 6


def test_withheld_text_is_released_when_it_cannot_be_a_stop():
    assert "".join(feed([b"A"] * 5, stop=["AB", "AAAAAAB"])) == "AAAAA"
    assert feed([b"a", b"b", b"x"], stop=["abc"]) == ["", "", "abx", ""]
    assert feed([b"aab", b"aac"], stop=["aabaad"]) == ["", "aabaac", ""]
    assert feed([b"xab", b"c"], stop=["abd"]) == ["x", "abc", ""]


def test_only_the_longest_possible_beginning_is_held():
    assert feed([b"aaa", b"a", b"c"], stop=["aab"]) == ["a", "a", "aac", ""]


@pytest.mark.parametrize(("include", "expected"), [(False, " th"), (True, " the t")])
def test_stop_inside_a_token(include, expected):
    stream = TextStream(vocabulary(b" the"), stop=["e t"], include_stop=include)
    assert stream.push(258) + stream.push(258) == expected
    assert stream.matched == "e t"
    assert stream.push(258) == "" and stream.finish() == ""


def test_stop_is_text_and_not_ids():
    assert "".join(feed([b" Paris", b".", b"\n", b"\n", b"\n\n"], stop=["\n\n"])) == " Paris."


def test_earliest_position_wins_then_the_shortest():
    def run(stops: list[str], text: bytes) -> tuple[str, str | None]:
        stream = TextStream(vocabulary(text), stop=stops, include_stop=True)
        return stream.push(258), stream.matched

    assert run(["cd", "bcde"], b"abcdef") == ("abcde", "bcde")
    assert run(["bcd", "bc"], b"abcdef") == ("abc", "bc")
    assert run(["bc", "bcd"], b"abcdef") == ("abc", "bc")
    assert run(["ef", "ab"], b"abcdef") == ("ab", "ab")


def test_stop_may_hold_a_replacement_character_of_the_end():
    stream = TextStream(vocabulary(), stop=["x\ufffd"])
    assert [stream.push(120), stream.push(0xC3), stream.finish()] == ["", "", ""]
    assert stream.matched == "x\ufffd"


def test_min_tokens_counts_the_tokens_before_the_one_that_completes_a_stop():
    def run(min_tokens: int) -> tuple[str, str | None]:
        stream = TextStream(vocabulary(), stop=["ab"], min_tokens=min_tokens)
        text = "".join(stream.push(ord(c)) for c in "xabab")
        return text + stream.finish(), stream.matched

    assert run(0) == run(2) == ("x", "ab")  # "b" comes after two tokens
    assert run(3) == run(4) == ("xab", "ab")
    assert run(5) == ("xabab", None)


def test_min_tokens_holds_for_the_end_of_the_text():
    def run(min_tokens: int) -> str | None:
        stream = TextStream(vocabulary(), stop=["\ufffd"], min_tokens=min_tokens)
        stream.push(0xC3)
        stream.finish()
        return stream.matched

    assert run(0) == "\ufffd" and run(1) is None


def test_stop_may_begin_before_min_tokens():
    stream = TextStream(vocabulary(), stop=["abc"], min_tokens=2)
    assert [stream.push(ord(c)) for c in "abc"] == ["", "", ""] and stream.matched == "abc"


def test_stops_are_prepared_once_for_several_streams():
    stops = Stops(["ab", "", "ab"])
    assert stops.strings == ("ab",)
    first, second = (TextStream(vocabulary(), stop=stops) for _ in range(2))
    assert first.push(97) == "" and second.push(98) == "b" and first.push(99) == "ac"


def test_no_stop_strings_hold_nothing_back():
    assert feed([b"a", b"b"], stop=["", ""]) == ["a", "b", ""]


def test_many_long_stops_on_adverse_text_stay_cheap():
    """Held text is followed, not searched again: the work a token grows with neither stop nor text."""
    stream = TextStream(vocabulary(), stop=["a" * 1000 + chr(200 + i) for i in range(64)])
    out = "".join(stream.push(97) for _ in range(3000))
    assert out == "a" * 2000 and stream.finish() == "a" * 1000


# Laws

ALPHABET = st.sampled_from([*"ab\n é€🦙", "e\u0301", "👩\u200d🚀", "\ufffd"])
TEXT = st.lists(ALPHABET, max_size=12).map("".join)
NOISE = st.binary(max_size=4) | st.sampled_from([b"\xc4", b"\xf0\x9f", b"\xed\xa0\x80", b"\xe2\x82", b"\xf4\x90"])
STOP = st.lists(ALPHABET, min_size=1, max_size=4).map("".join)


@st.composite
def answers(draw) -> list[int | bytes]:
    """Draw an answer: bytes cut anywhere into tokens, special ids and ids without bytes between them."""
    data = b"".join(draw(st.lists(TEXT.map(str.encode) | NOISE, max_size=5)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 2)))
    tokens: list[int | bytes] = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    for position in draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
        tokens.insert(position, draw(st.sampled_from([256, 257, 70000])))
    return tokens


def ids_of(tokens: list[int | bytes]) -> tuple[Vocabulary, list[int]]:
    pieces = [token for token in tokens if isinstance(token, bytes)]
    numbers = iter(range(258, 258 + len(pieces)))
    return vocabulary(*pieces), [token if isinstance(token, int) else next(numbers) for token in tokens]


def certain(data: bytes) -> str:
    """Return the text of ``data`` without an end that may become a character."""
    for cut in range(len(data), max(len(data) - 4, -1), -1):
        # An end is unfinished if some continuation makes it one whole character.
        end = data[cut:]
        follow = [b"\x80", b"\x90", b"\xa0", b"\x80\x80", b"\x90\x80", b"\xa0\x80", b"\x80\x80\x80", b"\x90\x80\x80"]
        if end and any(is_character(end + more) for more in follow):
            return data[:cut].decode(errors="replace")
    return data.decode(errors="replace")


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def reference(vocab: Vocabulary, ids: list[int], stops: list[str], skip: bool, min_tokens: int, include: bool):
    """Do the same slowly: decode everything anew at each token, search everything anew."""
    skipped = vocab.special_ids if skip else frozenset()
    data, before, shown = b"", "", []
    for count in range(len(ids) + 1):
        last = count == len(ids)
        if not last and ids[count] not in skipped:
            data += vocab.bytes_of(ids[count])
        text = data.decode(errors="replace") if last else certain(data)
        tokens_before = count - 1 if last else count
        if tokens_before >= min_tokens:
            ends = [
                (end - len(stop), len(stop))
                for stop in stops
                for end in range(len(before) + 1, len(text) + 1)
                if text[:end].endswith(stop)
            ]
            if ends:
                start, size = min(ends)
                return [*shown, text[: start + size] if include else text[:start]], text[start : start + size]
        held = 0 if last else max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        shown.append(text[: len(text) - held])
        before = text
    return shown, None


@given(answers(), st.lists(STOP, max_size=3), st.booleans(), st.integers(0, 4), st.booleans())
@example([b"ab", b"ab", b"a"], ["aba", "b"], True, 1, False)
@example([b"\xed", b"\xa0", b"\x80"], [], True, 0, False)
def test_stream_equals_the_slow_reference_at_every_token(tokens, stops, skip, min_tokens, include):
    vocab, ids = ids_of(tokens)
    expected, matched = reference(vocab, ids, stops, skip, min_tokens, include)
    stream = TextStream(vocab, stops, include, skip, min_tokens)
    shown = ""
    for number, token_id in enumerate(ids):
        shown += stream.push(token_id)
        assert shown == expected[min(number, len(expected) - 1)]
    shown += stream.finish()
    assert shown == expected[-1] and stream.matched == matched
    if matched is not None:
        assert stream.push(97) == "" and stream.finish() == ""


@given(answers(), st.booleans())
def test_joined_text_is_the_decoded_answer(tokens, skip):
    vocab, ids = ids_of(tokens)
    stream = TextStream(vocab, skip_special=skip)
    text = "".join([stream.push(i) for i in ids]) + stream.finish()
    assert text == vocab.decode(ids, skip_special_tokens=skip)


@given(answers(), st.lists(STOP, min_size=1, max_size=3))
def test_no_stop_string_is_ever_shown(tokens, stops):
    vocab, ids = ids_of(tokens)
    stream = TextStream(vocab, stops)
    text = "".join([stream.push(i) for i in ids]) + stream.finish()
    assert not [stop for stop in stops if stop in text]
    assert vocab.decode(ids).startswith(text)


@given(answers(), st.lists(STOP, max_size=3), st.integers(0, 4))
def test_what_is_held_may_still_be_a_stop_or_a_character(tokens, stops, min_tokens):
    vocab, ids = ids_of(tokens)
    stream = TextStream(vocab, stops, min_tokens=min_tokens)
    shown, data = "", b""
    for token_id in ids:
        shown += stream.push(token_id)
        if stream.matched is not None:
            return
        data += b"" if token_id in SPECIAL else vocab.bytes_of(token_id)
        text = certain(data)
        assert text.startswith(shown)
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
