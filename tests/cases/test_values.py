"""The cases PV-* and HS-09: values out of range, bodies out of shape. docs/cases.md says what each case is about."""

from __future__ import annotations

import json

import pytest

MODEL = "smollm2-135m"
FRANCE = "The capital of France is"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0}
JSON = {"content-type": "application/json"}


def refused_as(server, param, route="completions", **body):
    """Check that a body is refused by the name of a field; return the message."""
    error = server.refused(route, **body)
    assert error["param"] == param, error
    return error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [FRANCE, ""], [], [[]], [[504], []]], ids=repr)
def test_pv_01_nothing_to_continue_is_refused(server, prompt):
    refused_as(server, "prompt", prompt=prompt, max_tokens=4)
    server.assert_alive()


@pytest.mark.parametrize("prompt", [[49152], [-1], [504, 2**40], [504, 10**18], [[504], [49152]]], ids=repr)
def test_pv_03_ids_outside_the_vocabulary_are_refused(server, prompt):
    message = refused_as(server, "prompt", prompt=prompt, max_tokens=1)
    flat = [i for item in prompt for i in (item if isinstance(item, list) else [item])]
    assert "49152" in message and str(flat[-1]) in message
    server.assert_alive()


def test_pv_04_the_four_forms_of_a_prompt_are_equal(server):
    ids = [504, 3575, 282, 4649, 314]
    for prompt in (FRANCE, [FRANCE], ids, [ids]):
        for answer in server.both("completions", prompt=prompt, max_tokens=1, **GREEDY):
            assert answer.text == " Paris" and answer.usage["prompt_tokens"] == 5
    two = server.post("completions", prompt=[ids, [33, 28, 216, 34, 28]], max_tokens=1, **GREEDY).json()
    assert [choice["index"] for choice in two["choices"]] == [0, 1] and two["choices"][0]["text"] == " Paris"


@pytest.mark.parametrize(
    "prompt", [[504, "a"], [True, False], [1.5], ["a", [504]], [[504], "a"], [[True]], {}, 5], ids=repr
)
def test_pv_04_other_forms_are_refused(server, prompt):
    refused_as(server, "prompt", prompt=prompt, max_tokens=1)


OUT_OF_RANGE = [
    ("temperature", (-1, 2.5, "x", True)),
    ("top_p", (0, -0.5, 2)),
    ("top_k", (-2, 1.5)),
    ("min_p", (-0.1, 2)),
    ("presence_penalty", (3, -2.1)),
    ("frequency_penalty", (100,)),
    ("repetition_penalty", (0, -1, 11)),
    ("n", (0, -1, 129)),
    ("priority", (2**31, 10**25)),
    ("cache_salt", ("", "x" * 1025)),
    ("truncate_prompt_tokens", (0, -2)),
]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OUT_OF_RANGE for v in values])
def test_pv_06_values_out_of_range_are_refused_by_name(server, name, value):
    message = refused_as(server, name, prompt=FRANCE, max_tokens=1, **{name: value})
    assert "allowed: " in message
    assert refused_as(server, name, "chat", messages=HELLO, max_tokens=1, stream=True, **{name: value}) == message


IN_RANGE = [
    {"temperature": 2}, {"top_p": 1}, {"top_k": -1}, {"top_k": 0}, {"top_k": 1}, {"top_k": 10**9}, {"top_k": 2**63},
    {"presence_penalty": 2, "frequency_penalty": -2}, {"presence_penalty": -2}, {"min_p": 1}, {"priority": -(2**31)},
]  # fmt: skip


@pytest.mark.parametrize("fields", IN_RANGE, ids=repr)
def test_pv_06_values_at_the_edge_are_taken(server, fields):
    assert server.post("completions", prompt=FRANCE, max_tokens=1, **fields).status_code == 200


def test_pv_08_what_does_not_fit_says_how_long_it_is(tight):
    for count in (256, 257):
        reply = tight.post("completions", prompt=[260] * count, max_tokens=1)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert "256" in error["message"] and str(count) in error["message"]
    error = tight.refused("completions", prompt=[260] * 250, max_tokens=100)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens" and "250" in error["message"]
    answer = tight.ask("completions", prompt=[260] * 255, max_tokens=1)
    assert (answer.tokens, answer.finish_reason) == (1, "length")
    ended = tight.ask("chat", messages=[{"role": "user", "content": "word " * 200}], ignore_eos=True, seed=1)
    assert ended.usage["total_tokens"] == 256 and ended.finish_reason == "length"
    tight.assert_alive()


def test_pv_09_a_long_conversation_is_refused_unless_it_may_be_cut(tight):
    asked = {"messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 4}
    assert tight.refused("chat", **asked)["code"] == "context_length_exceeded"
    for most, kept in ((100, 100), (-1, 252)):
        for answer in tight.both("chat", **asked, truncate_prompt_tokens=most):
            assert answer.usage["prompt_tokens"] == kept
            assert [w["code"] for w in answer.bodies[0]["warnings"]] == ["prompt_truncated"]
    assert "warnings" not in tight.post("chat", messages=HELLO, max_tokens=4, truncate_prompt_tokens=100).json()


@pytest.mark.parametrize("value", [-1, 1.5, "10", True, [5]], ids=repr)
def test_pv_10_a_limit_is_a_whole_number_from_0(server, value):
    refused_as(server, "max_tokens", prompt=FRANCE, max_tokens=value)
    refused_as(server, "max_completion_tokens", "chat", messages=HELLO, max_completion_tokens=value)


def test_pv_10_limits_null_huge_none_and_twice(server):
    assert server.ask("completions", prompt=FRANCE, max_tokens=None, **GREEDY).tokens <= 16
    assert "10000000" in refused_as(server, "max_tokens", prompt=FRANCE, max_tokens=10**12)
    for answer in server.both("completions", prompt=FRANCE, max_tokens=0):
        assert (answer.text, answer.tokens, answer.finish_reason) == ("", 0, "length")
    for answer in server.both("chat", messages=HELLO, max_completion_tokens=3, **GREEDY):
        assert answer.tokens == 3
    assert server.ask("chat", messages=HELLO, max_completion_tokens=3, max_tokens=3, **GREEDY).tokens == 3
    refused_as(server, "max_completion_tokens", "chat", messages=HELLO, max_completion_tokens=3, max_tokens=4)
    server.assert_alive()


def test_pv_11_another_model_is_not_found_and_none_is_missing(server):
    for route, prompt in (("completions", {"prompt": FRANCE}), ("chat", {"messages": HELLO})):
        reply = server.post(route, **prompt, model="nope", max_tokens=1)
        error = reply.json()["error"]
        assert reply.status_code == 404 and (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]
        refused_as(server, "model", route, **prompt, model=None)
    assert server.http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert server.http.get("/v1/models/nope").status_code == 404


BODIES = [b"", b"null", b"[]", b"{", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 5000, b"{}" * 3]
DEEP = [
    ("chat", {"messages": "x", "chat_template_kwargs": "nested"}),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": ["nested"]}]}),
    ("chat", {"messages": "x", "metadata": "nested"}),
    ("completions", {"prompt": "nested"}),
    ("completions", {"prompt": "x", "extra": "nested"}),
]


@pytest.mark.parametrize(("route", "body"), DEEP, ids=repr)
@pytest.mark.parametrize("levels", [62, 500, 990])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_pv_13_deep_bodies_are_refused(server, route, body, levels, opens, closes):
    nested = opens * levels + "1" + closes * levels
    data = json.dumps({"model": MODEL, "max_tokens": 1, **body}).replace('"nested"', nested)
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    reply = server.http.post(path, content=data, headers=JSON)
    error = reply.json()["error"] if reply.status_code != 200 else None
    assert reply.status_code in (200, 400) and (levels == 62 or "nested deeper" in error["message"])


MESSAGES = [5, [], [{}], [{"role": "wizard", "content": "x"}], [{"role": "user", "content": 5}], [[]], [None]]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/generate", "/v1/embeddings"]
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_pv_13_bad_bodies_get_the_envelope(server, path, kind):
    for body in BODIES:
        reply = server.http.post(path, content=body, headers={"content-type": kind} if kind else {})
        assert reply.status_code == (400 if kind == "application/json" else 415)
        assert set(reply.json()) == {"error"} and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    server.assert_alive()


@pytest.mark.parametrize("messages", MESSAGES, ids=repr)
def test_pv_13_bad_messages_are_named(server, messages):
    refused_as(server, "messages", "chat", messages=messages, max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("GET", "/nope", 404), ("POST", "/v1/nope", 404)],
)
def test_pv_13_wrong_methods_and_paths_get_the_envelope(server, method, path, status):
    reply = server.http.request(method, path)
    assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, -1, 2**64 - 1])
def test_pv_15_seeds_come_again(server, seed):
    asked = {"prompt": "Once", "max_tokens": 6, "temperature": 1, "seed": seed}
    one, again = (server.ask("completions", **asked).text for _ in range(2))
    assert one == again


@pytest.mark.parametrize("seed", [2**70, 1.5, "x", True, -(2**64)], ids=repr)
def test_pv_15_other_seeds_are_refused(server, seed):
    body = json.dumps({"model": MODEL, "prompt": "x", "seed": seed})
    reply = server.http.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "seed"


UNSUPPORTED = [
    ("suffix", " return x"), ("audio", {"voice": "x", "format": "wav"}), ("web_search_options", {}), ("colour", 1),
    ("functions", [{"name": "f"}]), ("prediction", {"type": "content"}), ("best_off", 1), ("chat_template", "{{ 7 }}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_pv_16_what_is_not_done_is_refused_by_name(server, name, value):
    refused_as(server, name, prompt="def f(", max_tokens=2, **{name: value})
    refused_as(server, name, "chat", messages=HELLO, max_tokens=2, **{name: value})


CHANGES = [
    {"temperature": 2, "seed": 5}, {"temperature": 1, "seed": 6, "top_k": 2}, {"logit_bias": {"49": 100}}, {"n": 2},
    {"frequency_penalty": 2, "logit_bias": {"49": 20}}, {"presence_penalty": 2, "logit_bias": {"49": 25}},
    {"repetition_penalty": 10}, {"stop": ["."]}, {"stop_token_ids": [30]}, {"bad_words": ["Paris"]}, {"max_tokens": 3},
    {"allowed_token_ids": [49, 50]}, {"echo": True}, {"logprobs": 1}, {"prompt_logprobs": 1},
    {"truncate_prompt_tokens": 2}, {"best_of": 2}, {"stop": ".", "include_stop_str_in_output": True},
]  # fmt: skip


def test_pv_16_every_field_changes_the_answer(server):
    def shown(**fields):
        body = server.post("completions", **{"prompt": FRANCE, "max_tokens": 8, **GREEDY, **fields}).json()
        return [{**choice, "usage": body["usage"]["completion_tokens"]} for choice in body["choices"]]

    plain = shown()
    assert not [fields for fields in CHANGES if shown(**fields) == plain]


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "org/other-model",
    "file:///x",
    "a" * 300_000,
    "%2e%2e%2f",
    "",
    "\x00",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_hs_09_no_name_makes_the_server_look_for_a_model(server, name):
    reply = server.post("completions", model=name, prompt=FRANCE, max_tokens=1)
    error = reply.json()["error"]
    assert reply.status_code == 404 and error["code"] == "model_not_found" and len(error["message"]) < 250
    assert reply.elapsed.total_seconds() < 1
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == [MODEL]
