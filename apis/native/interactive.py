"""/v1/chat/interactive and /generate, as LMDeploy v0.1 had them: the server keeps the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slotline.apis.native.bodies import InteractiveBody
from slotline.apis.native.sessions import Session, Sessions
from slotline.apis.openai.answers import notices_body
from slotline.apis.openai.conversation import Conversation
from slotline.apis.openai.errors import ApiError, to_json
from slotline.apis.openai.exchange import Exchange
from slotline.apis.openai.jobs import Job
from slotline.apis.openai.messages import normalise
from slotline.apis.openai.models import parse
from slotline.apis.openai.post import Asked, Post
from slotline.apis.openai.service import Service
from slotline.engine import Engine
from slotline.handle import RequestHandle
from slotline.request import Completion, Notice, Output, Usage

OUTPUT_LEN = 512  # request_output_len where it is not given, as in LMDeploy
LINES = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
NOTHING = {"text": "", "tokens": 0, "input_tokens": 0, "history_tokens": 0, "finish_reason": None}


@dataclass(slots=True)
class Turn:
    """What the user says next, and what is left of what was said before.

    Attributes:
        history: messages that still fit.
        added: the user's.
        dropped: how many of the oldest messages do not fit any more.
        history_tokens: of ``history``.
        keep: the conversation goes on after this answer.
        answered: it has been, so ``keep`` holds; a turn that failed changes nothing.
        give_back: gives the session back, however the turn ends; a second time does nothing.
    """

    history: list[dict[str, Any]]
    added: list[dict[str, Any]]
    dropped: int = 0
    history_tokens: int = 0
    keep: bool = False
    answered: bool = False
    give_back: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Give the session back, if that was not done before."""
        self.give_back()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return what the model sees."""
        return self.history + self.added


class Interactive(Post):
    """Answer the next turn of a conversation; the caller sends that turn and a number.

    A turn that is broken off, or fails, leaves the conversation as it was before.
    """

    prefix = "chatint-"
    renamed = InteractiveBody.renamed

    def __init__(self, service: Service, sessions: Sessions) -> None:
        super().__init__(service)
        self._sessions = sessions
        self._timer: asyncio.TimerHandle | None = None

    async def reply(self, asked: Asked) -> Exchange | Mapping[str, Any]:
        """Answer, end a conversation, or break off its answer."""
        body = parse(InteractiveBody, asked.data)
        if body.model is not None:
            self.service.check_model(body.model)
        key = None if body.session_id in (None, -1) else (asked.client, body.session_id)
        if body.breaks_off or body.ends:
            body.params(0)  # what is wrong with it is said, though nothing is generated
            return self._settle(body, key)
        if key is None and body.interactive_mode:
            raise ApiError(400, "session_id is missing; allowed with interactive_mode: a number", param="session_id")
        if key is None or (key not in self._sessions and not body.keeps):
            return await self._exchange(asked, body, Session(), None)
        session = self._sessions.take(key)
        try:
            return await self._exchange(asked, body, session, key)
        except BaseException:
            self._sessions.release(key, keep=True)
            raise

    def _settle(self, body: InteractiveBody, key: Hashable) -> Mapping[str, Any]:
        """Do what needs no answer."""
        if key is None:
            raise ApiError(400, "session_id is missing; allowed: the number of a session", param="session_id")
        if body.breaks_off:
            self._sessions.abort(key)
        else:
            self._sessions.forget(key)
        return NOTHING

    async def _exchange(self, asked: Asked, body: InteractiveBody, session: Session, key: Hashable) -> Exchange:
        history = [] if body.begins_anew else session.messages
        added = normalise(body.prompt)
        turn = await _fitting(asked.engine, history, added, body.request_output_len)
        turn.keep = body.keeps
        params = body.params(await _output_len(asked.engine, turn, body.request_output_len))
        job = Job(
            model=self.service.names()[0],
            prompts=[turn.messages],
            params=params,
            stream=bool(body.stream),
            include_usage=False,
            conversation=Conversation(turn.messages),
            renamed=body.renamed,
        )
        if key is not None:
            turn.give_back = partial(self._release, key, turn)
        return Exchange(self.service, asked, job, partial(self._answer, turn, session), turn.end)

    def _answer(self, turn: Turn, session: Session, handle: RequestHandle) -> InteractiveAnswer:
        session.abort = handle.abort
        return InteractiveAnswer(turn, session, handle)

    def _release(self, key: Hashable, turn: Turn) -> None:
        turn.give_back = _nothing
        self._sessions.release(key, keep=turn.keep or not turn.answered)
        if self._timer is None and len(self._sessions):
            self._arm()

    def _arm(self) -> None:
        """Look again later for what has been unused too long."""
        timeout = self.service.settings.session_timeout
        self._timer = asyncio.get_running_loop().call_later(timeout + 1, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._sessions.expire()
        if len(self._sessions):
            self._arm()


class InteractiveAnswer:
    """One answer in LMDeploy's shape; a stream has a line of JSON for each piece."""

    stream_headers: Sequence[tuple[bytes, bytes]] = LINES

    def __init__(self, turn: Turn, session: Session, handle: RequestHandle) -> None:
        self._turn = turn
        self._session = session
        self._handle = handle
        self._texts: list[str] = []
        self._tokens = 0
        prompt_tokens = len(handle.prompt_token_ids[0])
        self._counts = {
            "input_tokens": max(prompt_tokens - turn.history_tokens, 0),
            "history_tokens": min(turn.history_tokens, prompt_tokens),
        }
        self._unsent = notices_body([*handle.warnings, *_dropped_notice(turn.dropped)])

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        (done,) = completions
        self._texts.append(done.text)
        self._commit()
        return self._body(done.text, usage.completion_tokens, done.finish_reason)

    def piece(self, output: Output) -> bytes:
        """Return the line for a piece; b"" where it has nothing to show."""
        self._tokens += len(output.token_ids)
        self._texts.append(output.text)
        if not output.text and output.finish_reason is None:
            return b""
        return to_json(self._body(output.text, self._tokens, output.finish_reason)) + b"\n"

    def end(self, usage: Usage) -> bytes:
        """Keep what was said."""
        self._commit()
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the error as the last line."""
        return to_json(error.envelope()) + b"\n"

    def _body(self, text: str, tokens: int, finish_reason: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"text": text, "tokens": tokens, **self._counts, "finish_reason": finish_reason}
        if finish_reason is not None:
            body["cached_tokens"] = self._handle.usage.cached_tokens
        if self._unsent:
            body["warnings"], self._unsent = self._unsent, []
        return body

    def _commit(self) -> None:
        answer = {"role": "assistant", "content": "".join(self._texts)}
        self._session.messages = [*self._turn.messages, answer]
        self._turn.answered = True
        self._turn.give_back()  # before the last byte is sent: the client may go on as soon as it has that


def _nothing() -> None:
    """There is nothing to give back."""


def _dropped_notice(count: int) -> list[Notice]:
    if not count:
        return []
    message = f"the conversation outgrew the context; its {count} oldest messages were dropped"
    return [Notice("history_dropped", "session_id", message)]


async def _fitting(
    engine: Engine, history: list[dict[str, Any]], added: list[dict[str, Any]], wanted: int | None
) -> Turn:
    """Leave out as few of the oldest turns as make room for the answer; what a system message says stays.

    A turn is what the user said and what came of it. Where even the new one alone does not fit, the
    engine says so.
    """
    most = engine.max_model_len
    room = most - (min(OUTPUT_LEN, most // 2) if wanted is None else wanted)
    head = next((i for i, message in enumerate(history) if message["role"] == "user"), len(history))
    starts = [i for i in range(head, len(history)) if history[i]["role"] == "user"] + [len(history)]

    def left(turns: int) -> list[dict[str, Any]]:
        return history[:head] + history[starts[turns] :]

    low, high = 0, len(starts) - 1  # the fewest to drop, by bisection; mostly none is
    middle = 0
    while low < high:
        if len(await engine.chat_prompt(left(middle) + added)) <= room:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    kept = left(low)
    tokens = len(await engine.chat_prompt(kept, add_generation_prompt=False)) if kept else 0
    return Turn(kept, added, len(history) - len(kept), tokens)


async def _output_len(engine: Engine, turn: Turn, wanted: int | None) -> int:
    """Return how many tokens to make: as asked, or what fits of the usual number."""
    if wanted is not None:
        return wanted
    room = engine.max_model_len - len(await engine.chat_prompt(turn.messages))
    return max(min(OUTPUT_LEN, room), 1)
