"""A real server around the small real model, and answers in one form, whether they came whole or in pieces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from slotline import EngineConfig
from slotline.manager import PluginManager
from slotline.text import Vocabulary

MODEL = "smollm2-135m"
FRANCE = "The capital of France is"
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def strict(text: str) -> Any:
    """Parse JSON that has no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Answer:
    """What a request gave; a stream's pieces are joined as a client joins them.

    Attributes:
        bodies: the whole answer, or the chunks of a stream without the one that has the usage.
        texts: the text of each body.
    """

    bodies: list[dict[str, Any]]
    usage: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for choice in self._choices():
            part = choice.get("message", choice.get("delta"))
            text = choice["text"] if part is None else part.get("content", "")
            self.texts.append(text)

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for body in self.bodies for choice in body["choices"]]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        (reason,) = [c["finish_reason"] for c in self._choices() if c["finish_reason"] is not None]
        return reason

    @property
    def tokens(self) -> int:
        return self.usage["completion_tokens"]

    @property
    def logprobs(self) -> dict[str, list[Any]] | None:
        """The lists of the logprobs object, joined over all bodies; None where no body has one."""
        parts = [c["logprobs"] for c in self._choices() if c["logprobs"] is not None]
        if not parts:
            return None
        lists = [name for name, value in parts[0].items() if value is not None]
        return {name: [entry for part in parts for entry in part[name]] for name in lists}


class Server:
    """`slotline serve` as a process of its own, until ``stop``."""

    def __init__(self, log: Path, *options: str) -> None:
        command = [sys.executable, "-P", "-m", "slotline", "serve", *options, "--port", "0"]
        self.log = log
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        ready = self.process.stdout.readline()
        found = re.search(r"http://\S+", ready)
        assert found, f"the server said {ready!r} and {self.said()}"
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def said(self) -> str:
        """Return what it wrote to stderr."""
        return self.log.read_text(encoding="utf-8")

    def stop(self) -> int:
        """Drain, and return the exit code."""
        self.http.close()
        self.process.terminate()
        code = self.process.wait(timeout=30)
        self.process.stdout.close()
        return code

    def post(self, route: str, **body: Any) -> httpx.Response:
        """Send a body; a model is named unless the body does."""
        return self.http.post(ROUTES[route], json={"model": MODEL, **body})

    def ask(self, route: str, **body: Any) -> Answer:
        """Return the answer to a body, whole or streamed as that says."""
        if body.get("stream"):
            body = {**body, "stream_options": {"include_usage": True}}
        reply = self.post(route, **body)
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            whole = strict(reply.text)
            return Answer([whole], whole["usage"])
        *events, last, end = reply.text.split("\n\n")
        assert last == "data: [DONE]" and end == ""
        *chunks, total = [strict(event.removeprefix("data: ")) for event in events]
        assert total["choices"] == []
        return Answer(chunks, total["usage"])

    def both(self, route: str, **body: Any) -> list[Answer]:
        """Return the answer whole, then streamed."""
        return [self.ask(route, **body), self.ask(route, **body, stream=True)]

    def refused(self, route: str, **body: Any) -> dict[str, Any]:
        """Return the error of a body that is wrong."""
        reply = self.post(route, **body)
        assert reply.status_code == 400, reply.text
        (name, error), *rest = strict(reply.text).items()
        assert name == "error" and not rest and set(error) == {"message", "type", "param", "code"}
        return error

    def assert_alive(self) -> None:
        """Check that the same process still answers, and rightly."""
        assert self.process.poll() is None and self.http.get("/health").status_code == 200
        reply = self.ask("completions", prompt=FRANCE, max_tokens=1, temperature=0)
        assert reply.text == " Paris"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the default model; one process for all tests that need no settings of their own."""
    server = Server(tmp_path_factory.mktemp("server") / "log", "--max-slots", "8", "--kv-cache-tokens", "8192")
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0
    assert "Traceback" not in server.said()


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the default model in 256 tokens of context and so little memory that requests have to make room."""
    options = ("--max-model-len", "256", "--kv-cache-tokens", "512", "--block-size", "16", "--max-slots", "12")
    server = Server(tmp_path_factory.mktemp("tight") / "log", *options)
    try:
        yield server
    finally:
        code = server.stop()
    assert code == 0
    assert "Traceback" not in server.said()


@pytest.fixture(scope="session")
def vocabulary(server: Server) -> Vocabulary:
    """Return the vocabulary of the model that is served."""
    manager = PluginManager("")
    return Vocabulary(manager.hook.slotline_open_model(config=EngineConfig(), manager=manager).tokenizer)
