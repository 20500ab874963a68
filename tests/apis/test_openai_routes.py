"""The OpenAI routes over an engine that plays a script: shapes, errors, order, disconnects."""

import json

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from slotline.apis.openai import Settings, create_app, routes
from slotline.backend import Capabilities
from slotline.errors import (
    ClientLimitExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    InvalidParameter,
    QueueFull,
    StepFailed,
)
from slotline.request import Notice

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": "fake", "prompt": "ab"}


HEADERS = {"content-type": "application/json"}


async def post(fake, engine, path, body, **headers):
    async with fake.client(create_app(engine)) as client:
        return await client.post(path, content=json.dumps(body), headers=HEADERS | headers)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Whole answers


async def test_chat_has_openais_shape(fake):
    engine = fake.Engine(fake.say("Hel"), fake.say("lo", finish="stop"))
    reply = await post(fake, engine, "/v1/chat/completions", CHAT)
    body = strict(reply.text)
    assert reply.status_code == 200 and body["object"] == "chat.completion" and body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None and choice["index"] == 0
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "warnings" not in body
    assert reply.headers["x-request-id"] == body["id"]


async def test_completions_number_choices_over_prompts_and_n(fake):
    pieces = [fake.say(f"{p}{i}", finish="length", prompt_index=p, index=i) for p in range(2) for i in range(2)]
    reply = await post(fake, fake.Engine(*pieces), "/v1/completions", {**TEXT, "prompt": ["a", "b"], "n": 2})
    choices = [(c["index"], c["text"]) for c in reply.json()["choices"]]
    assert choices == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]


async def test_warnings_are_in_the_body(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    engine.warnings = [Notice("logprobs_unsupported", "logprobs", "this backend has none")]
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        reply = await post(fake, engine, path, body)
        assert reply.json()["warnings"] == [
            {"code": "logprobs_unsupported", "param": "logprobs", "message": "this backend has none"}
        ]


async def test_lmdeploys_body_works_as_written(fake):
    body = {
        "model": "fake",
        "messages": "write a poem about spring",
        "temperature": 0.7,
        "top_p": 1,
        "n": 1,
        "max_tokens": 512,
        "stop": False,
        "stream": False,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "user": "string",
        "repetition_penalty": 1,
        "renew_session": False,
        "ignore_eos": False,
    }
    engine = fake.Engine(fake.say("x", finish="stop"))
    assert (await post(fake, engine, "/v1/chat/completions", body)).status_code == 200
    (asked,) = engine.submitted
    assert asked["prompts"] == [[{"role": "user", "content": "write a poem about spring"}]]
    assert asked["params"].stop is None and asked["params"].max_tokens == 512


async def test_content_parts_and_null_become_text(fake):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "refusal": None}]
    engine = fake.Engine(fake.say("x", finish="stop"))
    assert (await post(fake, engine, "/v1/chat/completions", {**CHAT, "messages": messages})).status_code == 200
    assert [m["content"] for m in engine.submitted[0]["prompts"][0]] == ["a\nb", ""]


async def test_max_tokens_of_completions_is_16_and_of_chat_the_context(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    await post(fake, engine, "/v1/completions", TEXT)
    await post(fake, engine, "/v1/chat/completions", CHAT)
    await post(fake, engine, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 3})
    assert [asked["params"].max_tokens for asked in engine.submitted] == [16, None, 3]


async def test_a_message_is_continued(fake):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "One, "}]
    engine = fake.Engine(fake.say("two", finish="stop"))
    body = {**CHAT, "messages": messages, "continue_final_message": True}
    assert (await post(fake, engine, "/v1/chat/completions", body)).status_code == 200
    assert bytes(engine.submitted[0]["prompts"][0]) == b"<user>qOne, "


# Logprobs


async def test_chat_logprobs_sort_the_token_among_the_best(fake):
    rows = fake.table([(97, -2.0, 3), (98, -0.5, 1), (99, -1.0, 2)], [(100, -0.1, 1), (101, -3.0, 2)])
    engine = fake.Engine(fake.say("ad", finish="length", logprobs=rows))
    reply = await post(fake, engine, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    logprobs = strict(reply.text)["choices"][0]["logprobs"]
    assert set(logprobs) <= {"content", "refusal"}
    first, second = logprobs["content"]
    assert first["token"] == "a" and first["bytes"] == [97]
    assert [entry["token"] for entry in first["top_logprobs"]] == ["b", "c"]
    assert [entry["token"] for entry in second["top_logprobs"]] == ["d", "e"]
    assert engine.submitted[0]["params"].logprobs == 2


async def test_completions_logprobs_count_characters(fake):
    text = "é\N{LLAMA}!"
    ids = list(text.encode())
    rows = fake.table(*([(i, -1.0, 1)] for i in ids))
    engine = fake.Engine(fake.say(text, finish="length", logprobs=rows))
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "logprobs": 0})
    logprobs = reply.json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    assert logprobs["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", *(rf"bytes:\x{b:02x}" for b in ids[2:6]), "!"]
    assert logprobs["top_logprobs"][-1] == {"!": -1.0}
    assert {len(values) for values in logprobs.values()} == {7}


async def test_candidates_spelt_alike_have_keys_of_their_own(fake):
    """Bytes differ; ids beyond the tokenizer spell nothing, all of them. The token itself keeps its spelling."""
    rows = fake.table(
        [(0xC4, -2.0, 3), (0xC3, -0.5, 1), (300, -1.0, 2), (301, -3.0, 4)], [(301, -0.5, 2), (300, -0.1, 1)]
    )
    engine = fake.Engine(fake.say("\ufffd\ufffd", finish="length", logprobs=rows))
    engine.script[0].token_ids = [0xC4, 301]
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "logprobs": 4})
    logprobs = strict(reply.text)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [r"bytes:\xc4", ""]
    assert logprobs["top_logprobs"] == [
        {r"bytes:\xc4": -2.0, r"bytes:\xc3": -0.5, "": -1.0, "token_id:301": -3.0},
        {"": -0.5, "token_id:300": pytest.approx(-0.1)},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(fake, stream):
    prompt_rows = fake.table([], [(98, -1.5, 4), (99, -0.25, 1)])
    first = fake.say("c", logprobs=fake.table([(99, -0.5, 1)]), prompt_logprobs=prompt_rows)
    last = fake.say("d", finish="length", logprobs=fake.table([(100, -0.75, 1)]))
    whole = fake.say(
        "cd", finish="length", logprobs=fake.table([(99, -0.5, 1)], [(100, -0.75, 1)]), prompt_logprobs=prompt_rows
    )
    engine = fake.Engine(first, last) if stream else fake.Engine(whole)
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "echo": True, "logprobs": 1, "stream": stream})
    bodies = [json.loads(e) for e in fake.events(reply.text)[:-1]] if stream else [reply.json()]
    choices = [body["choices"][0] for body in bodies]
    joined = {name: [v for c in choices for v in c["logprobs"][name]] for name in choices[0]["logprobs"]}
    assert "".join(c["text"] for c in choices) == "abcd" == "".join(joined["tokens"])
    assert joined["token_logprobs"] == [None, -1.5, -0.5, -0.75]
    assert joined["text_offset"] == [0, 1, 2, 3]
    assert joined["top_logprobs"][0] is None and joined["top_logprobs"][1] == {"b": -1.5, "c": -0.25}
    assert engine.submitted[0]["params"].prompt_logprobs == 1


async def test_echoed_choices_wait_for_the_prompts_logprobs(fake):
    """They come in parts, and with the first choice only."""
    other = fake.say("y", index=1, logprobs=fake.table([(121, -0.5, 1)]))
    parts = [fake.say("", prompt_logprobs=fake.table([])), fake.say("", prompt_logprobs=fake.table([(98, -1.5, 1)]))]
    ends = [fake.say("x", index=i, finish="length", logprobs=fake.table([(120, -0.5, 1)])) for i in range(2)]
    engine = fake.Engine(other, *parts, *ends)
    asked = {**TEXT, "echo": True, "logprobs": 0, "stream": True, "n": 2}
    reply = await post(fake, engine, "/v1/completions", asked)
    texts, tokens = {0: "", 1: ""}, {0: [], 1: []}
    for event in fake.events(reply.text)[:-1]:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == {0: "abx", 1: "abyx"} and tokens == {0: list("abx"), 1: list("abyx")}


async def test_prompt_logprobs_by_their_own_name(fake):
    rows = fake.table([], [(98, -1.5, 4)])
    engine = fake.Engine(fake.say("c", finish="length", prompt_logprobs=rows))
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "prompt_logprobs": 0})
    assert reply.json()["choices"][0]["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -1.5, "rank": 4, "decoded_token": "b"}},
    ]


# Streams


async def test_a_chat_stream(fake):
    engine = fake.Engine(fake.say("Hel"), fake.say(""), fake.say("lo\n"), fake.say("", finish="stop"))
    reply = await post(fake, engine, "/v1/chat/completions", {**CHAT, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last = fake.events(reply.text)
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo\n"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
    assert all("usage" not in c for c in chunks)


async def test_fast_and_careful_events_have_the_same_keys(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b"), fake.say("c", finish="stop"))
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        reply = await post(fake, engine, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        first, second, *_ = [json.loads(event) for event in fake.events(reply.text)[:-1]]
        assert list(first) == list(second) and list(first["choices"][0]) == list(second["choices"][0])


async def test_include_usage_adds_one_last_chunk(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b", finish="length"))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = await post(fake, engine, "/v1/completions", {**TEXT, **options})
    *chunks, last = [json.loads(event) for event in fake.events(reply.text)[:-1]]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "stream": True, "stream_options": {}})
    assert all("usage" not in json.loads(event) for event in fake.events(reply.text)[:-1])


async def test_warnings_are_in_the_first_chunk_alone(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b"), fake.say("c", finish="stop"))
    engine.warnings = [Notice("c", "seed", "m")]
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "stream": True})
    chunks = [json.loads(event) for event in fake.events(reply.text)[:-1]]
    assert [chunk.get("warnings") for chunk in chunks] == [[{"code": "c", "param": "seed", "message": "m"}], None, None]


async def test_lone_surrogates_do_not_break_a_stream(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b"), fake.say("c", finish="stop"))
    engine.script[1].text = "\ud800"
    engine.script[2].text = "\ud801"
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "stream": True})
    assert [json.loads(e)["choices"][0]["text"] for e in fake.events(reply.text)[:-1]] == ["a", "?", "?"]


async def test_an_error_before_the_first_piece_has_a_status(fake):
    engine = fake.Engine(StepFailed("kernel at /secret/path"))
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "stream": True})
    assert reply.status_code == 500 and "secret" not in reply.text
    assert reply.json()["error"]["code"] == "step_failed"


async def test_an_error_inside_a_stream_is_its_last_event(fake):
    engine = fake.Engine(fake.say("a"), RuntimeError("/secret/path"))
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "stream": True})
    *_, last = fake.events(reply.text)
    assert reply.status_code == 200 and "secret" not in reply.text
    assert set(json.loads(last)["error"]) == {"message", "type", "param", "code"}


# Errors


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidParameter.of("temperature", 3, "0 to 2"), 400, "invalid_parameter", "temperature"),
        (ContextLengthExceeded("too long", param="prompt"), 400, "context_length_exceeded", "prompt"),
        (QueueFull("full", retry_after=1.2), 503, "queue_full", None),
        (ClientLimitExceeded("enough"), 429, "client_limit", None),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", None),
        (EngineClosed("closed"), 503, "engine_closed", None),
        (ValueError("oops"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_by_class(fake, error, status, code, param, stream):
    reply = await post(fake, fake.Engine(refuse=error), "/v1/completions", {**TEXT, "stream": stream})
    shown = reply.json()["error"]
    assert (reply.status_code, shown["code"], shown["param"]) == (status, code, param)
    assert reply.headers.get("retry-after") == {"queue_full": "2", "client_limit": "1"}.get(code)


async def test_engine_fields_have_the_routes_names(fake):
    engine = fake.Engine(refuse=InvalidParameter.of("logprobs", 2, "0 to 1"))
    reply = await post(fake, engine, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    assert reply.json()["error"]["param"] == "top_logprobs"
    assert reply.json()["error"]["message"] == "top_logprobs is 2; allowed: 0 to 1"


WRONG = [
    ("temperature", "x"),
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 2),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", 100),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", "1"),
    ("n", True),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("min_tokens", -1),
    ("seed", 2**70),
    ("seed", 1.5),
    ("seed", "x"),
    ("seed", True),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [5]),
    ("stop", {}),
    ("stop", True),
    ("stop", ["x"] * 10_000),
    ("stop", "x" * 1_000_000),
    ("stop_token_ids", ["1"]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", []),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", "no"),
    ("priority", "high"),
    ("cache_salt", 5),
    ("suffix", " x"),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("audio", {}),
    ("web_search_options", {}),
    ("temperatur", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: repr(v)[:20])
@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
async def test_wrong_values_are_named(fake, body, field, value):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    engine = fake.Engine()
    reply = await post(fake, engine, path, {**body, field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400 and not engine.submitted


@pytest.mark.parametrize(
    "prompt",
    [[], [504, "a"], [True, False], [1.5], [[1], "a"], [[1], [True]], [["a"]], {}, 5, ["a", 1]],
    ids=repr,
)
async def test_wrong_prompts_are_refused(fake, prompt):
    reply = await post(fake, fake.Engine(), "/v1/completions", {**TEXT, "prompt": prompt})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        5,
        [{}],
        ["x"],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "colour": "red"}],
    ],
    ids=lambda v: repr(v)[:40],
)
async def test_wrong_messages_are_refused(fake, messages):
    reply = await post(fake, fake.Engine(), "/v1/chat/completions", {**CHAT, "messages": messages})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_completion_tokens": -6}, "max_completion_tokens"),
        ({"chat_template": "{{ 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_wrong_chat_fields(fake, extra, param):
    reply = await post(fake, fake.Engine(), "/v1/chat/completions", {**CHAT, **extra})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_best_of_needs_a_backend_with_logprobs(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    assert (await post(fake, engine, "/v1/completions", {**TEXT, "best_of": 1})).status_code == 200
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "best_of": 2})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "best_of"


def three_choices(fake, **more):
    """Return pieces of three choices, the second of which is the likeliest by token, the third next."""
    values = {0: (-3.0, -3.0), 1: (-0.1, -0.3), 2: (-1.0,)}
    for index, row in values.items():
        table = fake.table(*([(65 + index, value, 1)] for value in row))
        text = chr(65 + index) * len(row)
        yield fake.say(text, index=index, finish="length", logprobs=table, **more)


async def test_best_of_shows_the_likeliest_by_token_and_counts_all(fake):
    engine = fake.Engine(*three_choices(fake))
    engine.capabilities = Capabilities(logprobs=True, max_logprobs=20)
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "n": 2, "best_of": 3})
    shown = [(c["index"], c["text"], c["logprobs"]) for c in reply.json()["choices"]]
    assert shown == [(0, "BB", None), (1, "C", None)]
    assert reply.json()["usage"]["completion_tokens"] == 5
    assert (engine.submitted[0]["params"].n, engine.submitted[0]["params"].logprobs) == (3, 0)
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "best_of": 3, "logprobs": 0})
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "BB" and choice["logprobs"]["token_logprobs"] == pytest.approx([-0.1, -0.3])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 0, "best_of": 2}, "n"),
        ({"best_of": 0}, "best_of"),
    ],
)
async def test_wrong_numbers_of_choices(fake, fields, param):
    engine = fake.Engine()
    engine.capabilities = Capabilities(logprobs=True, max_logprobs=20)
    reply = await post(fake, engine, "/v1/completions", {**TEXT, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert param in reply.json()["error"]["message"]


async def test_an_echoed_prompt_is_the_one_that_was_used(fake):
    engine = fake.Engine(fake.say("!", finish="stop"))
    reply = await post(fake, engine, "/v1/completions", {**TEXT, "echo": True, "truncate_prompt_tokens": 1})
    assert engine.submitted[0]["params"].truncate_prompt_tokens == 1
    assert reply.json()["choices"][0]["text"] == "ab!"  # the scripted engine has both tokens, decoded from ids


BODIES = [b"", b"null", b"[]", b"{", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model":NaN}', b'{"a":"\\ud800"}']


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:12]))
async def test_bad_bodies(fake, path, kind, body):
    headers = {"content-type": kind} if kind else {}
    async with fake.client(create_app(fake.Engine())) as client:
        reply = await client.post(path, content=body, headers=headers)
    assert reply.status_code in (400, 415)
    assert set(reply.json()) == {"error"} and set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_models_and_the_unknown(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    async with fake.client(create_app(engine, served_model_name=["a", "org/b"])) as client:
        listed = (await client.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["a", "org/b"]
        assert (await client.get("/v1/models/org/b")).json()["id"] == "org/b"
        assert (await client.get("/v1/models/c")).status_code == 404
        for name in ("nope", "../../etc/passwd", "a" * 300_000):
            reply = await client.post("/v1/completions", json={**TEXT, "model": name})
            error = reply.json()["error"]
            assert reply.status_code == 404 and error["code"] == "model_not_found" and error["param"] == "model"
            assert len(error["message"]) < 250
        reply = await client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/models/", 405),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_unknown_paths_and_methods(fake, method, path, status):
    async with fake.client(create_app(fake.Engine())) as client:
        reply = await client.request(method, path)
    assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_request_ids(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    reply = await post(fake, engine, "/v1/completions", TEXT, **{"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1" and reply.json()["id"] != "abc-1"
    reply = await post(fake, engine, "/v1/completions", TEXT, **{"x-request-id": "a b"})
    assert reply.status_code == 400


async def test_long_bodies_are_refused(fake):
    app = create_app(fake.Engine(), settings=Settings(max_body_bytes=100))
    async with fake.client(app) as client:
        reply = await client.post("/v1/completions", json={**TEXT, "prompt": "x" * 200})
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


async def test_routes_mount_under_a_prefix(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = Starlette(routes=[Mount("/llm", routes=routes(engine))])
    async with fake.client(app) as client:
        assert (await client.post("/llm/v1/completions", json=TEXT)).status_code == 200
        reply = await client.put("/llm/v1/completions", json=TEXT)
        assert reply.status_code == 405 and reply.json()["error"]["code"] == "method_not_allowed"


# Clients that leave, or do not read


class Wire:
    """The two ends of a raw ASGI call."""

    def __init__(self, body, path="/v1/completions"):
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("10.0.0.1", 5),
        }
        self.body = json.dumps(body).encode()
        self.gone = anyio.Event()
        self.sent = []
        self.stuck = None
        self.first_event = anyio.Event()

    async def receive(self):
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.first_event.set()
            if self.stuck is not None:
                await self.stuck.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_aborts(fake, stream):
    engine = fake.Engine(fake.say("a"), anyio.Event(), fake.say("b", finish="stop"))
    wire = Wire({**TEXT, "stream": stream})
    async with anyio.create_task_group() as group:
        group.start_soon(create_app(engine), wire.scope, wire.receive, wire.send)
        if stream:
            await wire.first_event.wait()
        else:
            await anyio.wait_all_tasks_blocked()
        wire.gone.set()
    assert engine.handles[0].aborted
    assert not any(message.get("more_body") is False for message in wire.sent)


async def test_a_client_that_does_not_read_is_dropped(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b", finish="stop"))
    wire = Wire({**TEXT, "stream": True})
    wire.stuck = anyio.Event()
    app = create_app(engine, settings=Settings(write_timeout=0.02))
    await app(wire.scope, wire.receive, wire.send)
    assert engine.handles[0].aborted


async def test_a_send_that_raises_ends_quietly(fake):
    engine = fake.Engine(fake.say("a"), fake.say("b", finish="stop"))
    wire = Wire({**TEXT, "stream": True})

    async def send(message):
        raise OSError("gone")

    await create_app(engine)(wire.scope, wire.receive, send)
    assert engine.handles[0].aborted


async def test_hanging_up_inside_the_body_is_nothing(fake):
    wire = Wire(TEXT)
    wire.body = None
    wire.gone.set()
    await create_app(fake.Engine())(wire.scope, wire.receive, wire.send)
    assert wire.sent == []


async def test_a_body_that_does_not_come_times_out(fake):
    wire = Wire(TEXT)
    wire.body = None
    app = create_app(fake.Engine(), settings=Settings(body_timeout=0.02))
    await app(wire.scope, wire.receive, wire.send)
    assert wire.sent[0]["status"] == 408
