"""One request on its way through the engine and back; every way out frees what was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import anyio
from starlette.types import Receive, Send

from slotline.apis.openai.answers import Answer
from slotline.apis.openai.errors import logger, send_error, send_json, to_api_error
from slotline.apis.openai.jobs import Job
from slotline.apis.openai.service import Service
from slotline.apis.openai.streams import ClientGone, TimedSend, wait_for_hangup
from slotline.engine import Engine
from slotline.handle import RequestHandle


class Origin(Protocol):
    """Where a request came from; `slotline.apis.openai.post.Asked` is one."""

    @property
    def engine(self) -> Engine: ...
    @property
    def answer_id(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def client(self) -> str | None: ...


class Exchange:
    """Submit a job, send what comes of it.

    Args:
        service: of the route.
        asked: the request.
        job: what it asks of the engine.
        to_answer: makes what shapes the answer, once the engine has taken the job.
        on_end: called however it ends.
    """

    def __init__(
        self,
        service: Service,
        asked: Origin,
        job: Job,
        to_answer: Callable[[RequestHandle], Answer],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._asked = asked
        self._job = job
        self._to_answer = to_answer
        self._on_end = on_end
        self._begun: Answer | None = None  # whose stream has begun

    async def run(self, receive: Receive, send: Send) -> None:
        """Run the request until it is answered or its client is gone."""
        limit = self._service.settings.write_timeout
        try:
            with anyio.CancelScope() as scope:
                watch = asyncio.ensure_future(wait_for_hangup(receive, scope))
                timed = TimedSend(send, limit, scope.cancel)
                try:
                    await self._answer_or_fail(timed)
                except ClientGone:
                    pass
                finally:
                    timed.close()
                    watch.cancel()
        finally:
            self._on_end()
        if timed.expired:
            logger.warning("request %s: aborted, its client read nothing for %g s", self._asked.request_id, limit)

    async def _answer_or_fail(self, send: Send) -> None:
        try:
            await self._answer(send)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(send, error)

    async def _answer(self, send: Send) -> None:
        handle = await self._submit()
        asked = self._asked
        try:
            with self._service.running.known(asked.answer_id, asked.request_id, asked.client, handle.abort):
                answer = self._to_answer(handle)
                if self._job.stream:
                    await self._stream(send, handle, answer)
                else:
                    body = answer.whole(await handle.completions(), handle.usage)
                    await send_json(send, body, headers={"X-Request-Id": asked.request_id})
        finally:
            handle.abort()  # whatever ended this; nothing happens to a request that is finished

    async def _submit(self) -> RequestHandle:
        job, asked = self._job, self._asked
        prompts, options, conversation = job.prompts, None, job.conversation
        if conversation is not None and conversation.opening is not None:
            prompts = [await conversation.encode(asked.engine)]
        elif conversation is not None:
            options = conversation.options
        return await asked.engine.submit(
            prompts,
            job.params,
            request_id=asked.answer_id,
            priority=job.priority,
            client=asked.client,
            deadline=self._service.settings.request_timeout,
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            embed=job.embed,
            chat_options=options,
        )

    async def _stream(self, send: Send, handle: RequestHandle, answer: Answer) -> None:
        """Send events. The head waits for the first piece, so that an error before it has a status."""
        piece = answer.piece
        async for outputs in handle.pieces():
            data = piece(outputs[0]) if len(outputs) == 1 else b"".join(map(piece, outputs))
            if self._begun is None:
                await self._begin(send, answer)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if self._begun is None:
            await self._begin(send, answer)
        await send({"type": "http.response.body", "body": answer.end(handle.usage), "more_body": False})

    async def _begin(self, send: Send, answer: Answer) -> None:
        headers = [*answer.stream_headers, (b"x-request-id", self._asked.request_id.encode())]
        self._begun = answer
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, error: Exception) -> None:
        """Tell the client: with a status where nothing was sent yet, else as the last piece of the stream."""
        shown = to_api_error(error, self._asked.request_id, self._job.renamed)
        if self._begun is not None:
            await send({"type": "http.response.body", "body": self._begun.failed(shown), "more_body": False})
        else:
            await send_error(send, shown, self._asked.request_id)
