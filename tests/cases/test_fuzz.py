"""Thousands of requests, right and mangled: each gets an answer in the right shape, and the server lives on.

The generator knows every field of every route, with values in and out of range, and then breaks some bodies as
bytes. What comes back is checked as far as it can be known without the model; after each thousand the server must
answer as if nothing had been.
"""

from __future__ import annotations

import asyncio
import json
import random
import string

import anyio
import httpx
import pytest

import slotline
from slotline.apis.openai import Settings, create_app

CONTEXT = 256
CONFIG = slotline.EngineConfig(
    model="echo", backend="echo", max_slots=8, max_queue=64, max_model_len=CONTEXT, kv_cache_tokens=4096
)
STATUSES = {200, 400, 404, 405, 408, 409, 413, 415, 429, 499, 503}
ROUTES = (
    "/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions", "/v1/chat/interactive",
    "/generate", "/tokenize", "/detokenize", "/abort", "/v1/embeddings",
)  # fmt: skip
WORDS = (
    "",
    "a",
    "Hello",
    "<|im_end|>",
    "<|end|>",
    "{{ 7*7 }}",
    "\u0000",
    "\ud83e\udd99",
    "naïve 日本",
    "x" * 300,
    "\n\n",
)
WILD = (
    None, True, False, 0, 1, -1, 2, 1.5, 1e308, -1e308, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**25, "", "x",
    "10", "9" * 400, [], {}, [[]], [None], {"a": None}, [1, "a"], [True], "\ud800", {"type": "text"}, "a" * 5000,
)  # fmt: skip


class Requests:
    """Make requests, the same ones for the same seed.

    Args:
        model: the name that is served.
        vocab_size: ids from 0 to this are right.
        longest: most tokens that a right request asks for.
    """

    def __init__(self, seed: int, model: str = "echo", vocab_size: int = 257, longest: int = 24) -> None:
        self.random = random.Random(seed)
        self.model = model
        self.vocab_size = vocab_size
        self.longest = longest

    def text(self) -> str:
        pick = self.random
        if pick.random() < 0.5:
            return pick.choice(WORDS)
        return "".join(pick.choices(string.ascii_letters + " .,\n<|>é日", k=pick.randint(1, 40)))

    def ids(self) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(1, 30))]

    def messages(self):
        pick = self.random
        if pick.random() < 0.2:
            return self.text()
        roles = pick.choices(("user", "assistant", "system", "developer", "tool"), k=pick.randint(1, 4))
        return [{"role": role, "content": self.content()} for role in roles]

    def content(self):
        kind = self.random.random()
        if kind < 0.7:
            return self.text()
        return None if kind < 0.8 else [{"type": "text", "text": self.text()} for _ in range(self.random.randint(0, 3))]

    def prompt(self):
        return self.random.choice((self.text, self.ids, lambda: [self.text(), "b"], lambda: [self.ids(), [1]]))()

    def sampling(self) -> dict:
        """Return some sampling fields, nearly all in range."""
        pick = self.random
        fields = {
            "temperature": lambda: pick.choice((0, 0.7, 1, 2)),
            "top_p": lambda: pick.choice((0.1, 1)),
            "top_k": lambda: pick.choice((-1, 0, 1, 40, 10**9)),
            "min_p": lambda: pick.choice((0, 0.5, 1)),
            "seed": lambda: pick.choice((0, -1, 2**63 - 1)),
            "ignore_eos": lambda: pick.random() < 0.5,
            "repetition_penalty": lambda: pick.choice((1, 1.2, 0.5)),
            "skip_special_tokens": lambda: pick.random() < 0.5,
        }
        return {name: make() for name, make in fields.items() if pick.random() < 0.2}

    def generation(self) -> dict:
        pick = self.random
        fields = {
            "n": lambda: pick.randint(1, 3),
            "stop": lambda: pick.choice(("x", ["a", "bb"], False, None, [])),
            "stop_token_ids": self.ids,
            "min_tokens": lambda: pick.randint(0, 4),
            "presence_penalty": lambda: pick.choice((-2, 0, 2)),
            "frequency_penalty": lambda: pick.choice((-2, 0, 2)),
            "logit_bias": lambda: {str(pick.randrange(self.vocab_size)): pick.choice((-100, 5, 100))},
            "allowed_token_ids": self.ids,
            "bad_words": lambda: ["zz"],
            "include_stop_str_in_output": lambda: True,
            "prompt_logprobs": lambda: pick.randint(0, 3),
            "logprobs_mode": lambda: pick.choice(("raw", "processed")),
            "priority": lambda: pick.choice((-5, 0, 7)),
            "cache_salt": lambda: pick.choice(("a", "b")),
            "truncate_prompt_tokens": lambda: pick.choice((-1, 1, 5)),
            "user": self.text,
            "tools": lambda: [],
            "session_id": lambda: 1,
        }
        body = {name: make() for name, make in fields.items() if pick.random() < 0.08}
        if pick.random() < 0.3:
            body["stream"] = True
            if pick.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        return {"model": self.model, "max_tokens": pick.randint(1, self.longest), **self.sampling(), **body}

    def body(self, route: str) -> dict:
        """Return a body that is right, but for what depends on others of its fields."""
        pick = self.random
        if route == "/v1/completions":
            own = {
                "echo": pick.random() < 0.5,
                "logprobs": pick.choice((None, 0, 2)),
                "best_of": pick.choice((None, 1, 3)),
            }
            return {
                **self.generation(),
                "prompt": self.prompt(),
                **{k: v for k, v in own.items() if pick.random() < 0.3},
            }
        if route == "/v1/chat/completions":
            own = {"logprobs": True, "top_logprobs": 2, "continue_final_message": True, "add_generation_prompt": False}
            chosen = {name: value for name, value in own.items() if pick.random() < 0.1}
            return {**self.generation(), "messages": self.messages(), **chosen}
        if route in ("/v1/chat/interactive", "/generate"):
            own = {
                "interactive_mode": True,
                "stream": True,
                "cancel": True,
                "sequence_start": True,
                "sequence_end": True,
            }
            chosen = {name: value for name, value in own.items() if pick.random() < 0.3}
            session = {"session_id": pick.randint(-1, 5)} if pick.random() < 0.7 else {}
            count = pick.randint(0, self.longest)
            return {"prompt": self.messages(), "request_output_len": count, **session, **chosen, **self.sampling()}
        if route == "/tokenize":
            return pick.choice(({"prompt": self.text(), "return_token_strs": True}, {"messages": self.messages()}))
        if route == "/detokenize":
            return {"tokens": self.ids()}
        if route == "/v1/embeddings":
            return {"model": self.model, "input": self.prompt()}
        return pick.choice(({"request_id": self.text()}, {"session_id": pick.randint(0, 5)}))

    def mangled(self, body):
        """Put something wild in one place of a JSON value, at any depth."""
        pick = self.random
        if isinstance(body, dict) and body and pick.random() < 0.9:
            name = pick.choice(list(body))
            how = pick.random()
            if how < 0.1:
                return {key: value for key, value in body.items() if key != name}
            if how < 0.2:
                return {
                    **body,
                    pick.choice(("colour", "chat_template", "functions", "__proto__", "")): pick.choice(WILD),
                }
            return {**body, name: self.mangled(body[name])}
        if isinstance(body, list) and body and pick.random() < 0.7:
            place = pick.randrange(len(body))
            return [*body[:place], self.mangled(body[place]), *body[place + 1 :]]
        return pick.choice(WILD)

    def broken(self, data: bytes) -> bytes:
        """Return bytes that may be no JSON any more."""
        pick, place = self.random, self.random.randrange(len(data) + 1)
        return pick.choice(
            (
                data[:place],
                data[:place] + bytes([pick.randrange(256)]) + data[place + 1 :],
                data[:place]
                + pick.choice((b"NaN", b"Infinity", b"\xff", b"\\ud800", b"[" * 300, b",,"))
                + data[place:],
                b"[" * 20_000,
                b"",
            )
        )

    def next(self) -> tuple[str, str, bytes, dict[str, str], bool]:
        """Return method, path, body, headers, and whether nothing was mangled."""
        pick = self.random
        route, kind = pick.choice(ROUTES), pick.random()
        body = self.body(route)
        for _ in range(0 if kind < 0.5 else pick.randint(1, 3)):
            body = self.mangled(body)
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if kind > 0.93:
            data = self.broken(data)
        if pick.random() < 0.1:
            headers["x-request-id"] = pick.choice(("mine", "a" * 129, "bad id", "ok-1"))
        if pick.random() < 0.03:
            headers["content-type"] = pick.choice(("text/plain", "application/json; charset=utf-16", ""))
        method = "POST" if pick.random() < 0.97 else pick.choice(("GET", "PUT", "DELETE", "OPTIONS"))
        path = (
            route if pick.random() < 0.97 else pick.choice(("/v1//completions", route + "/", "/v1/nope", "/%00", "//"))
        )
        return method, path, data, headers, kind < 0.5


def strict(text: str):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check(reply: httpx.Response, sent: tuple) -> None:
    """Check what can be known of an answer without knowing the model's."""
    method, path, data, _, plain = sent
    told = f"{method} {path} {data[:600]!r} gave {reply.status_code} {reply.text[:600]}"
    assert reply.status_code in STATUSES, told
    if reply.status_code != 200:
        body = strict(reply.text)
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, told
        assert body["error"]["message"] and len(body["error"]["message"]) < 1000, told
        assert not plain or reply.status_code != 415 or "json" not in sent[3]["content-type"], told
        return
    kind = reply.headers["content-type"].split(";")[0]
    if kind == "text/event-stream":
        check_stream(reply.text, told)
    elif kind == "application/x-ndjson":
        lines = [strict(line) for line in reply.text.splitlines()]
        assert "error" in lines[-1] or lines[-1]["finish_reason"] in ("stop", "length"), told
    elif "choices" in (body := strict(reply.text)):
        check_choices(body, json.loads(data), told)


def check_stream(text: str, told: str) -> None:
    *events, end = text.split("\n\n")
    assert end == "" and all(event.startswith("data: ") and "\n" not in event for event in events), told
    last = events.pop()
    bodies = [strict(event[6:]) for event in events]
    if last != "data: [DONE]":
        assert "error" in strict(last[6:]), told
        return
    ended = [c["index"] for b in bodies for c in b["choices"] if c["finish_reason"] is not None]
    seen = {c["index"] for b in bodies for c in b["choices"]}
    assert sorted(ended) == sorted(seen) and len({(b["id"], b["created"], b["model"]) for b in bodies}) == 1, told


def check_choices(body: dict, asked: dict, told: str) -> None:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], told
    prompt = asked.get("prompt")
    several = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c["index"] for c in body["choices"]] == list(range(several * (asked.get("n") or 1))), told
    assert all(c["finish_reason"] in ("stop", "length") for c in body["choices"]), told
    if asked.get("max_tokens") is not None:
        made = max(asked.get("best_of") or 1, asked.get("n") or 1)
        assert usage["completion_tokens"] <= several * made * asked["max_tokens"], told


class InProcess:
    """The routes over an echo engine, called without a network."""

    def __init__(self, engine: slotline.Engine) -> None:
        self.engine = engine
        app = create_app(engine, settings=Settings(max_body_bytes=1 << 16, max_sessions=4))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)
        self.answers = 0

    async def one(self, sent: tuple) -> None:
        method, path, data, headers, _ = sent
        reply = await self.client.request(method, path, content=data, headers=headers)
        self.answers += reply.status_code == 200
        check(reply, sent)

    async def assert_alive(self) -> None:
        """Check that nothing is left of what was asked, and that a request is answered rightly."""
        assert (await self.client.get("/health")).status_code == 200
        body = {"model": "echo", "prompt": "The capital of France is", "max_tokens": 11, "temperature": 0}
        with anyio.fail_after(5):
            reply = await self.client.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"] == "The capital"
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.active_blocks) == (0, 0, 0)


async def drive(made: Requests, count: int) -> None:
    """Send so many requests, some at the same time, a few of which hang up."""
    async with slotline.Engine.open(config=CONFIG) as engine:
        server = InProcess(engine)
        async with server.client:
            for done in range(0, count, 1000):
                batch = [made.next() for _ in range(min(1000, count - done))]
                for at in range(0, len(batch), 8):
                    tasks = [asyncio.ensure_future(server.one(sent)) for sent in batch[at : at + 8]]
                    if made.random.random() < 0.1:
                        await asyncio.sleep(0)
                        tasks[0].cancel()
                    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                        if isinstance(outcome, Exception):
                            raise outcome
                await server.assert_alive()
        assert count * 0.15 < server.answers < count * 0.85  # the generator makes both


async def test_three_thousand_requests_leave_the_server_as_it_was(caplog):
    await drive(Requests(seed=1), 3000)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_hundred_thousand_requests_leave_the_server_as_it_was():
    await drive(Requests(seed=random.randrange(2**32)), 100_000)


def test_three_hundred_requests_leave_a_real_server_as_it_was(server):
    made = Requests(seed=2, model="smollm2-135m", vocab_size=49152, longest=2)
    count = 0
    while count < 300:
        method, path, data, headers, plain = sent = made.next()
        if not plain and b"okens" in data:
            continue  # a mangled limit may be none, and an answer of thousands of tokens tests nothing here
        count += 1
        reply = server.http.request(method, path, content=data, headers=headers)
        check(reply, sent)
        if count % 100 == 0:
            server.assert_alive()
