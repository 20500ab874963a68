"""Routes beyond OpenAI's: tokens, aborting, conversations that the server keeps."""

from __future__ import annotations

import json

import anyio
import anyio.lowlevel
import httpx
import pytest

import slotline
from slotline.apis.native.sessions import Sessions
from slotline.apis.openai import Settings, create_app
from slotline.apis.openai.errors import ApiError

ECHO = slotline.EngineConfig(model="echo", backend="echo")


@pytest.fixture(scope="module")
async def echo(anyio_backend):
    async with slotline.Engine.open(config=ECHO) as engine:
        yield engine


async def call(fake, engine, path, body, status=200, settings=None):
    app = engine if callable(engine) else create_app(engine, settings=settings)
    async with fake.client(app) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json() if status == 200 else reply.json()["error"]


# Tokens


async def test_a_text_becomes_tokens_and_a_text_again(fake, echo):
    found = await call(fake, echo, "/tokenize", {"model": "echo", "prompt": "hé<|end|>", "return_token_strs": True})
    assert found == {
        "count": 4,
        "max_model_len": echo.max_model_len,
        "tokens": [104, 195, 169, 256],
        "token_strs": ["h", r"bytes:\xc3", r"bytes:\xa9", "<|end|>"],
    }
    body = {"tokens": found["tokens"]}
    assert await call(fake, echo, "/detokenize", body) == {"prompt": "hé<|end|>"}
    assert await call(fake, echo, "/detokenize", {**body, "skip_special_tokens": True}) == {"prompt": "hé"}


async def test_control_tokens_can_be_left_text(fake, echo):
    found = await call(fake, echo, "/tokenize", {"prompt": "<|end|>", "parse_special": False})
    assert found["tokens"] == list(b"<|end|>") and found["token_strs"] is None


async def test_messages_become_the_prompt_that_chat_would_have(fake):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "One"}]
    found = await call(fake, fake.Engine(), "/tokenize", {"messages": messages})
    assert bytes(found["tokens"]) == b"<user>q<assistant>One"
    found = await call(fake, fake.Engine(), "/tokenize", {"messages": messages, "continue_final_message": True})
    assert bytes(found["tokens"]) == b"<user>qOne"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": "x"}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": "x", "parse_special": False}, "parse_special"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": "x", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 40_000}, "tokens"),
        ("/abort", {}, "request_id"),
        ("/abort", {"request_id": "x", "session_id": 1}, "request_id"),
        ("/abort", {"request_id": 5}, "request_id"),
    ],
)
async def test_wrong_bodies_are_refused_by_name(fake, echo, path, body, param):
    error = await call(fake, echo, path, body, 400)
    assert error["param"] == param and param in error["message"]


async def test_another_model_is_not_found(fake, echo):
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/generate", {"prompt": "x"}),
    ):
        assert (await call(fake, echo, path, {**body, "model": "other"}, 404))["code"] == "model_not_found"


# Aborting


async def running(engine, count=1):
    for _ in range(10_000):
        if len(engine.handles) >= count:
            return
        await anyio.lowlevel.checkpoint()
    raise AssertionError("the request did not reach the engine")


@pytest.mark.parametrize("by", ["answer", "own"])
async def test_an_answer_is_aborted_from_another_connection(fake, by):
    engine = fake.Engine(anyio.Event())
    app, replies = create_app(engine), []

    async def ask():
        async with fake.client(app) as client:
            headers = {"X-Request-Id": "mine"}
            replies.append(await client.post("/v1/completions", json={"model": "fake", "prompt": "a"}, headers=headers))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await running(engine)
        handle = engine.handles[0]
        name = handle.request_id if by == "answer" else "mine"
        assert await call(fake, app, "/abort", {"request_id": "not " + name}) == {"aborted": 0}
        assert await call(fake, app, "/abort", {"request_id": name}) == {"aborted": 1}
        group.cancel_scope.cancel()
    assert handle.aborted


async def test_ids_that_clients_make_up_are_their_own(fake):
    running = create_app(fake.Engine()).router.routes[0].endpoint.service.running
    ended = []
    with (
        running.known("a1", "same", "one", lambda: ended.append(1)),
        running.known("a2", "same", "two", lambda: ended.append(2)),
    ):
        assert running.abort("same", "three") == 0 and running.abort("same", "two") == 1 and ended == [2]
        assert running.abort("a1", "three") == 1 and ended == [2, 1]
    assert running.abort("a1", None) == running.abort("same", "two") == 0


async def test_one_of_several_processes_does_not_say_that_there_is_no_such_answer(fake, echo):
    error = await call(fake, echo, "/abort", {"request_id": "x"}, 404, Settings(processes=2))
    assert error["code"] == "not_in_this_process"


async def test_an_aborted_answer_says_so(fake, echo):
    body = {"model": "echo", "prompt": "abc", "max_tokens": 30_000, "ignore_eos": True}
    app, replies = create_app(echo), []

    async def ask():
        async with fake.client(app) as client:
            replies.append(await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        while not (await call(fake, app, "/abort", {"request_id": "mine"}))["aborted"]:
            await anyio.lowlevel.checkpoint()
    assert replies[0].status_code == 499 and replies[0].json()["error"]["code"] == "aborted"


# Conversations that the server keeps


async def ask(app, body):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post("/generate", json=body)


def scope_of(path, body):
    """Return the scope of a POST, and what its body is received from."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await anyio.sleep_forever()

    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
             "scheme": "http", "query_string": b"", "headers": headers,
             "client": ("127.0.0.1", 1), "server": ("test", 80)}  # fmt: skip
    return scope, receive


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


async def test_one_turn_has_lmdeploys_shape(fake, echo):
    for path in ("/v1/chat/interactive", "/generate"):
        found = await call(fake, echo, path, {"prompt": "hello"})
        counts = {"tokens": 6, "input_tokens": 5, "history_tokens": 0, "cached_tokens": 0}
        assert found == {"text": "hello", "finish_reason": "stop", **counts}


async def test_a_stream_is_lines_of_json_that_add_up(fake, echo):
    async with fake.client(create_app(echo)) as client:
        reply = await client.post("/generate", json={"prompt": "hello", "stream": True})
    found = lines(reply.text)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["text"] for line in found) == "hello" and found[-1]["finish_reason"] == "stop"
    assert [line["tokens"] for line in found] == sorted(line["tokens"] for line in found) and found[-1]["tokens"] == 6
    assert all(line["finish_reason"] is None for line in found[:-1]) and found[-1]["cached_tokens"] == 0


def told(engine):
    """Return what the last request showed the model."""
    return [(m["role"], m["content"]) for m in engine.submitted[-1]["prompts"][0]]


SAID = [("user", "a"), ("assistant", "x"), ("user", "b")]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_remembers_a_session_and_no_other(fake, stream):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine)

    async def say(prompt, **fields):
        async with fake.client(app) as client:
            body = {"prompt": prompt, "session_id": 1, "interactive_mode": True, "stream": stream, **fields}
            reply = await client.post("/v1/chat/interactive", json=body)
            assert reply.status_code == 200, reply.text
            return lines(reply.text)[-1]

    assert (await say("a"))["history_tokens"] == 0
    assert (await say("b"))["history_tokens"] == 3 and told(engine) == SAID  # of the scripted prompt's three
    await say("b", session_id=2)
    assert told(engine) == [("user", "b")]
    await say("c", sequence_start=True)
    assert told(engine) == [("user", "c")]
    await say("d", interactive_mode=False)  # goes on with it, and ends it
    assert told(engine) == [("user", "c"), ("assistant", "x"), ("user", "d")]
    await say("e")
    assert told(engine) == [("user", "e")]
    assert (await say("", request_output_len=0))["text"] == ""
    await say("f")
    assert told(engine) == [("user", "f")]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_may_come_with_the_last_byte_of_this_one(fake, stream):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine)
    body = {"session_id": 1, "interactive_mode": True, "stream": stream, "prompt": "a"}
    statuses = []

    async def send(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            statuses.append((await ask(app, body)).status_code)

    await app(*scope_of("/generate", body), send)
    assert statuses == [200]


async def test_messages_and_a_system_message_are_a_turn_too(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine)
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    body = {"session_id": 1, "interactive_mode": True, "request_output_len": 8}
    await call(fake, app, "/generate", {**body, "prompt": prompt})
    await call(fake, app, "/generate", {**body, "prompt": "b"})
    assert told(engine) == [("system", "s"), *SAID]


async def test_what_outgrows_the_context_is_dropped_oldest_first_and_said_so(fake):
    engine = fake.Engine(fake.say("xxxx", finish="stop"))  # 64 tokens fit
    app = create_app(engine)
    body = {"session_id": 1, "interactive_mode": True, "request_output_len": 8}
    await call(
        fake,
        app,
        "/generate",
        {**body, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}]},
    )
    await call(fake, app, "/generate", {**body, "prompt": "2"})
    assert len(told(engine)) == 4
    found = await call(fake, app, "/generate", {**body, "prompt": "3"})
    assert told(engine) == [("system", "s"), ("user", "2"), ("assistant", "xxxx"), ("user", "3")]
    (warning,) = found["warnings"]
    assert warning["code"] == "history_dropped" and "2 oldest" in warning["message"]


async def test_a_turn_that_fails_leaves_the_conversation_as_it_was(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine)
    body = {"session_id": 1, "interactive_mode": True}
    await call(fake, app, "/generate", {**body, "prompt": "a"})
    script, engine.script = engine.script, (fake.say("half"), slotline.errors.StepFailed("broken"))
    await call(fake, app, "/generate", {**body, "prompt": "lost"}, 500)
    await call(fake, app, "/generate", {**body, "prompt": "lost", "interactive_mode": False}, 500)
    await call(fake, app, "/generate", {**body, "prompt": "x", "top_p": 7}, 400)
    engine.script = script
    await call(fake, app, "/generate", {**body, "prompt": "b"})
    assert told(engine) == SAID


@pytest.mark.parametrize("how", ["stop", "cancel", "abort", "hang up"])
async def test_an_answer_is_broken_off_and_one_session_gives_one_at_a_time(fake, how):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine)
    body = {"session_id": 5, "interactive_mode": True}
    await call(fake, app, "/generate", {**body, "prompt": "a"})
    script, engine.script = engine.script, (anyio.Event(),)
    async with anyio.create_task_group() as group:
        group.start_soon(call, fake, app, "/generate", {**body, "prompt": "lost"}, 499)
        await running(engine, 2)
        error = await call(fake, app, "/generate", {**body, "prompt": "too"}, 409)
        assert error["code"] == "session_busy" and error["param"] == "session_id"
        if how == "abort":
            assert await call(fake, app, "/abort", {"session_id": 5}) == {"aborted": 1}
        elif how != "hang up":
            await call(fake, app, "/generate", {"prompt": "", "session_id": 5, how: True})
        assert how == "hang up" or engine.handles[1].aborted
        group.cancel_scope.cancel()  # the scripted engine waits on, aborted or not
    engine.script = script
    await call(fake, app, "/generate", {**body, "prompt": "b"})
    assert told(engine) == SAID
    assert await call(fake, app, "/abort", {"session_id": 5}) == {"aborted": 0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [{"role": "wizard", "content": "x"}]}, "prompt"),
        ({"prompt": "x", "interactive_mode": True}, "session_id"),
        ({"prompt": "x", "interactive_mode": True, "session_id": "1"}, "session_id"),
        ({"prompt": "x", "request_output_len": -1}, "request_output_len"),
        ({"prompt": "x", "request_output_len": 10**9}, "request_output_len"),
        ({"prompt": "x", "temperature": 5}, "temperature"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "stop": True}, "session_id"),
        ({"prompt": "", "request_output_len": 0}, "session_id"),
        ({"prompt": "x", "max_new_tokens": 5}, "max_new_tokens"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_wrong_turns_are_refused_by_name(fake, echo, fields, param):
    error = await call(fake, echo, "/v1/chat/interactive", fields, 400)
    assert error["param"] == param and (param in error["message"] or param == "prompt")


async def test_stop_strings_work_where_stop_is_no_command(fake, echo):
    found = await call(fake, echo, "/generate", {"prompt": "hello", "stop": ["ll"]})
    assert found["text"] == "he"


async def test_a_server_can_keep_none(fake, echo):
    settings = Settings(max_sessions=0)
    body = {"prompt": "x", "session_id": 1, "interactive_mode": True}
    assert (await call(fake, echo, "/generate", body, 400, settings))["code"] == "no_sessions"
    assert (await call(fake, echo, "/generate", {"prompt": "x", "session_id": 1}, 200, settings))["text"] == "x"


def test_sessions_are_bounded_and_expire():
    now = [0.0]
    sessions = Sessions(2, 10.0, lambda: now[0])

    def use(key):
        session = sessions.take(key)
        session.messages = [{"role": "user", "content": key}]
        sessions.release(key, keep=True)

    for key in ("a", "b", "a", "c"):
        use(key)
    assert "b" not in sessions and "a" in sessions and "c" in sessions
    now[0] = 9.0
    use("c")
    now[0] = 15.0
    sessions.expire()
    assert "a" not in sessions and "c" in sessions
    sessions.take("c"), sessions.take("d")
    with pytest.raises(ApiError) as caught:
        sessions.take("e")
    assert caught.value.status == 503 and caught.value.headers["Retry-After"]
    now[0] = 100.0
    sessions.expire()
    assert len(sessions) == 2  # those that are being answered stay
    sessions.release("c", keep=True), sessions.release("d", keep=True)
    assert "d" not in sessions  # it was broken off before anything was said


async def test_what_is_unused_is_forgotten_though_nobody_calls(fake):
    engine = fake.Engine(fake.say("x", finish="stop"))
    app = create_app(engine, settings=Settings(session_timeout=-0.95))
    route = next(route for route in app.router.routes if route.name == "generate")
    await call(fake, app, "/generate", {"prompt": "a", "session_id": 1, "interactive_mode": True})
    kept = route.endpoint._sessions
    assert len(kept) == 1
    await anyio.sleep(0.3)
    assert not len(kept)
