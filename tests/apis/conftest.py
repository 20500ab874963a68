"""An engine without an engine: it says what a test scripted, so that surfaces are tested alone."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from slotline.backend import Capabilities
from slotline.config import EngineConfig
from slotline.errors import RequestAborted
from slotline.logprobs import Logprobs
from slotline.model import Model
from slotline.params import SamplingParams
from slotline.plan import LogprobColumns
from slotline.request import Completion, Notice, Output, Usage
from slotline.text import Vocabulary

EOS = 256


class ByteTokenizer:
    """One id a byte, then one end token."""

    vocab_size = 257
    special_ids = frozenset({EOS})

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), b"<eos>"]


VOCABULARY = Vocabulary(ByteTokenizer())


def table(*positions: Sequence[tuple[int, float, int]]) -> Logprobs:
    """Build logprobs from (id, value, rank) per position."""
    flat = [entry for position in positions for entry in position]
    indptr = np.cumsum([0, *map(len, positions)])
    ids, values, ranks = (np.array([entry[k] for entry in flat]) for k in range(3))
    columns = LogprobColumns(
        indptr.astype(np.int32), ids.astype(np.int32), values.astype(np.float32), ranks.astype(np.int32)
    )
    return Logprobs(columns, VOCABULARY)


def say(text: str, *, finish: str | None = None, **more: Any) -> Output:
    """Build a piece of an answer."""
    return Output(index=more.pop("index", 0), text=text, token_ids=list(text.encode()), finish_reason=finish, **more)


class FakeHandle:
    """Plays a script of pieces, exceptions to raise, and events to wait for."""

    def __init__(
        self, engine: FakeEngine, prompts: Sequence[Any], params: SamplingParams, request_id: str = "fake"
    ) -> None:
        self.request_id = request_id
        self.engine = engine
        self.prompt_token_ids = [list(p.encode()) if isinstance(p, str) else [7, 8, 9] for p in prompts]
        self.warnings = list(engine.warnings)
        self.created = time.time()
        self.aborted = False
        self.finished = False
        self.n = params.n
        self._tokens = 0

    @property
    def usage(self) -> Usage:
        return Usage(sum(map(len, self.prompt_token_ids)), self._tokens, 2)

    def abort(self) -> None:
        if not self.finished and not self.aborted:
            self.aborted = True
            self.engine.aborted.set()

    async def pieces(self) -> AsyncIterator[list[Output]]:
        try:
            for item in self.engine.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, anyio.Event):
                    await item.wait()
                    continue
                await anyio.lowlevel.checkpoint()
                if self.aborted:
                    raise RequestAborted("aborted")
                self._tokens += len(item.token_ids)
                yield [item]
            self.finished = True
        finally:
            self.abort()

    async def completions(self) -> list[Completion]:
        done: dict[tuple[int, int], Completion] = {}
        async for (out,) in self.pieces():
            key = out.prompt_index, out.index
            held = done.setdefault(key, Completion("", [], None, index=out.index))
            held.text += out.text
            held.token_ids += out.token_ids
            held.finish_reason, held.stop_reason = out.finish_reason, out.stop_reason
            held.logprobs = out.logprobs or held.logprobs
            held.prompt_logprobs = out.prompt_logprobs or held.prompt_logprobs
        firsts = []
        for prompt_index in range(len(self.prompt_token_ids)):
            choices = [c for (p, _), c in sorted(done.items()) if p == prompt_index]
            choices[0].choices = choices
            firsts.append(choices[0])
        return firsts


class FakeEngine:
    """What surfaces ask of an engine.

    Args:
        script: what each request gets: pieces, exceptions, events to wait for.
        refuse: raised by submit.
    """

    def __init__(self, *script: Output | Exception | anyio.Event, refuse: Exception | None = None) -> None:
        self.script = script
        self.refuse = refuse
        self.warnings: list[Notice] = []
        self.submitted: list[Mapping[str, Any]] = []
        self.handles: list[FakeHandle] = []
        self.aborted = anyio.Event()
        self.vocabulary = VOCABULARY
        self.max_model_len = 64
        self.capabilities = Capabilities()
        self.config = EngineConfig(model="fake")
        self.model = Model(name="fake", tokenizer=ByteTokenizer(), vocab_size=257, context_length=64)
        self.manager = self

    def registry(self, kind: str) -> dict[str, Any]:
        return {}

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        return self.model.tokenizer.encode(text, **options)

    async def submit(self, prompts: Sequence[Any], params: SamplingParams, **more: Any) -> FakeHandle:
        self.submitted.append({"prompts": prompts, "params": params, **more})
        if self.refuse is not None:
            raise self.refuse
        self.handles.append(FakeHandle(self, prompts, params, more.get("request_id", "fake")))
        return self.handles[-1]


def client_of(app: Any) -> httpx.AsyncClient:
    """Return a client that calls the application directly."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def events_of(body: str) -> list[str]:
    """Split a stream into the payloads of its events; each must be one line of data."""
    events = body.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


@pytest.fixture
def fake() -> SimpleNamespace:
    """Hand out the pieces above; test modules cannot import each other."""
    return SimpleNamespace(
        Engine=FakeEngine, say=say, table=table, client=client_of, events=events_of, vocabulary=VOCABULARY
    )
