"""The two generation routes, as plain ASGI: read, ask, answer; every way out frees what was taken."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import anyio
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from slotline.apis.openai.answers import DONE, Answer, ChatAnswer, CompletionAnswer
from slotline.apis.openai.errors import (
    ApiError,
    logger,
    model_not_found,
    send_error,
    send_json,
    to_api_error,
    wrong_method,
)
from slotline.apis.openai.jobs import Job, chat_job, completion_job
from slotline.apis.openai.models import ChatBody, CompletionBody, GenerationBody, parse
from slotline.apis.openai.service import Service, logprob_cap
from slotline.apis.openai.streams import (
    EVENT_STREAM_HEADERS,
    ClientGone,
    TimedSend,
    check_content_type,
    read_body,
    wait_for_hangup,
)
from slotline.engine import Engine
from slotline.handle import RequestHandle

Body = TypeVar("Body", bound=GenerationBody)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Generation(ABC, Generic[Body]):
    """POST a body, get generated text. Subclasses say which body, and how the answer looks."""

    body: type[Body]
    prefix = ""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        own_id = self.prefix + uuid.uuid4().hex
        request_id: str | None = own_id
        job: Job | None = None
        try:
            if scope["method"] != "POST":
                raise wrong_method(scope["method"], ("POST",))
            headers = Headers(scope=scope)
            request_id = _checked_id(headers.get("x-request-id")) or own_id
            engine = self._service.ready()
            check_content_type(headers.get("content-type"))
            job = self._job(await read_body(receive, self._service.settings), logprob_cap(engine))
        except ClientGone:
            return
        except Exception as error:
            await send_error(send, to_api_error(error, str(request_id)), request_id)
            return
        exchange = _Exchange(self, self._service, engine, job, own_id, request_id, _client(scope))
        await exchange.run(receive, send)

    @abstractmethod
    def to_job(self, body: Body, cap: int) -> Job:
        """Translate a body; ``cap`` is the most logprobs it may ask for."""

    @abstractmethod
    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle, answer_id: str) -> Answer:
        """Build what shapes the answer."""

    def _job(self, data: bytes, cap: int) -> Job:
        body = parse(self.body, data)
        names = self._service.names()
        if body.model not in names:
            raise model_not_found(body.model, names)
        return self.to_job(body, cap)


class Completions(Generation[CompletionBody]):
    """/v1/completions."""

    body = CompletionBody
    prefix = "cmpl-"

    def to_job(self, body: CompletionBody, cap: int) -> Job:
        """Translate a body."""
        return completion_job(body, cap)

    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle, answer_id: str) -> Answer:
        """Build what shapes the answer."""
        ids = handle.prompt_token_ids
        return CompletionAnswer(
            job,
            answer_id,
            int(handle.created),
            handle.warnings,
            vocabulary=engine.vocabulary,
            echoes=_echoes(job, engine, ids) if job.echo else (),
            prompt_ids=ids,
        )


class ChatCompletions(Generation[ChatBody]):
    """/v1/chat/completions."""

    body = ChatBody
    prefix = "chatcmpl-"

    def to_job(self, body: ChatBody, cap: int) -> Job:
        """Translate a body."""
        return chat_job(body, cap)

    def to_answer(self, job: Job, engine: Engine, handle: RequestHandle, answer_id: str) -> Answer:
        """Build what shapes the answer."""
        return ChatAnswer(job, answer_id, int(handle.created), handle.warnings)


class _Exchange:
    """One request on its way through the engine and back."""

    def __init__(
        self,
        route: Generation[Any],
        service: Service,
        engine: Engine,
        job: Job,
        answer_id: str,
        request_id: str,
        client: str | None,
    ) -> None:
        self._route = route
        self._service = service
        self._engine = engine
        self._job = job
        self._answer_id = answer_id
        self._request_id = request_id
        self._client = client
        self._begun = False

    async def run(self, receive: Receive, send: Send) -> None:
        """Run the request until it is answered or its client is gone."""
        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_hangup, receive, group.cancel_scope)
            limit = self._service.settings.write_timeout
            timed = TimedSend(send, limit, group.cancel_scope.cancel)
            try:
                await self._answer_or_fail(timed)
            except ClientGone:
                pass
            finally:
                timed.close()
                group.cancel_scope.cancel()
        if timed.expired:
            logger.warning("request %s: aborted, its client read nothing for %g s", self._request_id, limit)

    async def _answer_or_fail(self, send: Send) -> None:
        try:
            await self._answer(send)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(send, error)

    async def _answer(self, send: Send) -> None:
        handle = await self._submit()
        try:
            answer = self._route.to_answer(self._job, self._engine, handle, self._answer_id)
            if self._job.stream:
                await self._stream(send, handle, answer)
            else:
                completions = await handle.completions()
                body = answer.whole(completions, handle.usage)
                await send_json(send, body, headers={"X-Request-Id": self._request_id})
        finally:
            handle.abort()  # whatever ended this; nothing happens to a request that is finished

    async def _submit(self) -> RequestHandle:
        job = self._job
        prompts, options = job.prompts, job.options
        if job.opening is not None:
            prompts, options = [await _continued(self._engine, job)], None
        return await self._engine.submit(
            prompts,
            job.params,
            request_id=self._answer_id,
            priority=job.priority,
            client=self._client,
            deadline=self._service.settings.request_timeout,
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            chat_options=options,
        )

    async def _stream(self, send: Send, handle: RequestHandle, answer: Answer) -> None:
        """Send events. The head waits for the first piece, so that an error before it has a status."""
        piece = answer.piece
        async for outputs in handle.pieces():
            data = piece(outputs[0]) if len(outputs) == 1 else b"".join(map(piece, outputs))
            if not self._begun:
                await self._begin(send)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if not self._begun:
            await self._begin(send)
        last = answer.total(handle.usage) + DONE if self._job.include_usage else DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        headers = [*EVENT_STREAM_HEADERS, (b"x-request-id", self._request_id.encode())]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, error: Exception) -> None:
        """Tell the client: with a status where nothing was sent yet, else as the stream's last event."""
        shown = to_api_error(error, self._request_id, self._job.renamed)
        if self._begun:
            await send({"type": "http.response.body", "body": shown.event(), "more_body": False})
        else:
            await send_error(send, shown, self._request_id)


async def _continued(engine: Engine, job: Job) -> list[int]:
    """Return the prompt for a message that the assistant has begun: up to its turn, then what it said."""
    (messages,) = cast("Sequence[list[dict[str, Any]]]", job.prompts)
    ids = await engine.chat_prompt(messages, **(job.options or {}))
    return ids + engine.model.tokenizer.encode(str(job.opening), parse_special=False, add_special=False)


def _echoes(job: Job, engine: Engine, ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each prompt: as it came, or decoded with its special tokens."""
    return [
        prompt if isinstance(prompt, str) else engine.vocabulary.decode(prompt_ids, skip_special_tokens=False)
        for prompt, prompt_ids in zip(job.prompts, ids, strict=True)
    ]


def _checked_id(given: str | None) -> str | None:
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise ApiError(
            400, "X-Request-Id is not usable; allowed: 1 to 128 of A-Z a-z 0-9 . _ : -", param="X-Request-Id"
        )
    return given


def _client(scope: Scope) -> str | None:
    """Return whose share of the queue a request takes: the address it came from."""
    peer = scope.get("client")
    return str(peer[0]) if peer else None
