"""The echo backend: no model, no file. It repeats the prompt, one byte a token, at a set pace.

For front-end work, load tests, and as the smallest example of a backend. A row answers with its
own prompt and then the end token; with ignore_eos or min_tokens it begins the prompt again. It
has no logits, so no logprobs: requests that ask for them get a warning instead.

The pace is that of steps (``echo_delay``), which all rows share, or of each row (``echo_rate``), which then
waits in most steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slotline.backend import BackendEntry, BackendInfo, Capabilities
from slotline.errors import ChatTemplateError
from slotline.hookspecs import hookimpl
from slotline.model import Message, Model
from slotline.plan import BoolArray, IntArray, RowSetup, Status, StepPlan, StepResult

if TYPE_CHECKING:
    from slotline.config import EngineConfig

BYTES = 256
END = 256  # the end token
VOCAB = 257
CONTEXT = 32768
TICK = 0.001  # seconds: how finely rows that have a rate are paced
DEFAULT_KV_TOKENS = 1 << 20  # positions; there is no KV, so this only bounds what runs at once


class ByteTokenizer:
    """One token a byte, and one end token."""

    vocab_size = VOCAB
    special_ids = frozenset({END})
    _spelling = "<|end|>"

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the text's UTF-8 bytes."""
        if not parse_special or self._spelling not in text:
            return list(text.encode())
        ids: list[int] = []
        for i, part in enumerate(text.split(self._spelling)):
            ids += [END] * (i > 0) + list(part.encode())
        return ids

    def token_bytes(self) -> Sequence[bytes]:
        """Return each id's bytes."""
        return [bytes([i]) for i in range(BYTES)] + [self._spelling.encode()]


class EchoChat:
    """The last message's content is the prompt."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the last message's text."""
        content = messages[-1].get("content") if messages else None
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content)
        if not content:
            raise ChatTemplateError("the last message has no text; the echo model repeats it", param="messages")
        return str(content)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Return the last message's bytes."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return list(text.encode())


class EchoHandle:
    """A step whose tokens are known; its result waits for the pace."""

    def __init__(self, result: StepResult, ready_at: float) -> None:
        self._result = result
        self._ready_at = ready_at

    def ready(self) -> bool:
        """Tell whether its time has come."""
        return time.monotonic() >= self._ready_at

    def result(self) -> StepResult:
        """Return the step's result, not before its time."""
        wait = self._ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)  # on the backend's own thread
        return self._result


class EchoBackend:
    """Repeat each row's prompt."""

    capabilities = Capabilities(
        params=frozenset({"min_tokens", "ignore_eos", "stop_token_ids"}),
        block_sizes=(16, 32, 64, 128),
        pipeline_depth=2,
        deterministic=True,
    )

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        """Allocate the rows' columns."""
        self._delay = config.echo_delay
        self._interval = 1 / config.echo_rate if config.echo_rate else 0.0
        self._due = np.zeros(config.max_slots)  # when a row may have its next token
        self._position = np.zeros(config.max_slots, np.int32)  # of that token
        self._ready_at = 0.0  # of the step before, which may still be in flight
        self._tokens: list[IntArray] = [np.empty(0, np.int32)] * config.max_slots
        self._setup: list[RowSetup | None] = [None] * config.max_slots
        block_size = config.block_size or self.capabilities.block_sizes[0]
        kv_tokens = config.kv_cache_tokens or DEFAULT_KV_TOKENS
        return BackendInfo(
            num_blocks=max(kv_tokens // block_size, 1) + 1,
            block_size=block_size,
            bytes_per_block=0,
            max_model_len=config.max_model_len or model.context_length,
            vocab_size=VOCAB,
        )

    def launch(self, plan: StepPlan) -> EchoHandle:
        """Work out the step's tokens."""
        for setup in plan.admitted:
            self._setup[setup.row] = setup
            self._tokens[setup.row] = np.append(setup.token_ids[: setup.prompt_len], np.int32(END))
            self._position[setup.row] = len(setup.token_ids)
        waits = self._pace(plan)
        size, ends = len(plan), plan.start + plan.count
        tokens, status = np.full((size, 1), -1, np.int32), np.zeros(size, np.int8)
        status[waits] = Status.WAIT
        for i in np.flatnonzero(plan.sample & ~waits).tolist():
            tokens[i, 0], status[i] = self._next(int(plan.rows[i]), int(ends[i]))
        got = plan.sample & ((status == Status.OK) | (status == Status.STOP))
        rows = plan.rows[got]
        self._position[rows] = ends[got] + 1
        self._due[rows] = np.maximum(self._due[rows] + self._interval, self._ready_at)
        self._due[plan.rows[status == Status.STOP]] = 0
        result = StepResult(plan.step_id, plan.rows, plan.epoch, tokens, got.astype(np.int32), status)
        return EchoHandle(result, self._ready_at)

    def _pace(self, plan: StepPlan) -> BoolArray:
        """Decide when the step ends, and return [R] which rows have no token by then.

        It cannot end when a request arrives, which it does not see; so it ends soon, and at once for a row that begins.
        """
        self._ready_at = max(time.monotonic(), self._ready_at) + self._delay
        if not plan.admitted and plan.sample.all():
            self._ready_at += min(TICK, self._interval)
        self._due[[setup.row for setup in plan.admitted]] = self._ready_at
        late = plan.start + plan.count > self._position[plan.rows]  # it goes on from a token that did not come
        return plan.sample & (late | (self._due[plan.rows] > self._ready_at))

    def _next(self, row: int, position: int) -> tuple[int, int]:
        setup = self._setup[row]
        if setup is None:
            return -1, Status.DEAD
        cycle = self._tokens[row]
        at = position - setup.prompt_len
        token = int(cycle[at]) if at < len(cycle) else -1
        early = position < setup.min_len
        if token in (END, -1) and (early or END not in setup.stop_ids):  # go round without the end token
            token = int(cycle[at % (len(cycle) - 1)])
        if token in setup.stop_ids and not early:
            self._setup[row] = None
            return token, Status.STOP
        return token, Status.OK

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        for row in rows:
            self._setup[row] = None

    def close(self) -> None:
        """Nothing is held."""


def open_model(config: EngineConfig) -> Model:
    """Return the model that has no file."""
    return Model(
        name=config.model,
        tokenizer=ByteTokenizer(),
        chat=EchoChat(),
        vocab_size=VOCAB,
        context_length=CONTEXT,
        eos_ids=frozenset({END}),
        source="built in",
    )


@hookimpl
def slotline_register_backends(register: Callable[[BackendEntry], None]) -> None:
    """Register the echo backend."""
    register(
        BackendEntry(
            name="echo", create=EchoBackend, open_model=open_model, summary="repeats the prompt; needs no model"
        )
    )
