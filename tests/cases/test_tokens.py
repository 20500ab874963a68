"""The cases ML-* that /tokenize shows. docs/cases.md says what each case is about."""

from __future__ import annotations

import pytest

TEXTS = {
    "Hello world": [19556, 905],
    "12345": [33, 34, 35, 36, 37],
    "naïve café": [3546, 46494, 37366],
    "日本語": [23274, 115, 40993, 179, 120, 248],
    "don't stop": [12420, 982, 2853],
    "  leading": [216, 2899],
    "trailing  ": [4861, 4966, 256],
    "<|im_end|>": [2],
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
}


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_ml_03_a_text_has_the_ids_of_the_models_own_tokenizer(server, text):
    found = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == TEXTS[text] and found["count"] == len(TEXTS[text]) == len(found["token_strs"])
    assert found["max_model_len"] == 8192
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_ml_08_the_answer_ends_where_the_models_own_files_say(server):
    for answer in server.both("chat", messages="Hello", max_tokens=40, temperature=0):
        assert answer.text == "Hello! How can I assist you today?" and answer.finish_reason == "stop"
        assert answer.tokens == 10  # nine that show, and the end
