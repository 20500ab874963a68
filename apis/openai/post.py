"""What every POST route does before it answers: check the head, read the body, refuse in one shape."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from slotline.apis.openai.errors import ApiError, send_error, send_json, to_api_error, wrong_method
from slotline.apis.openai.exchange import Exchange
from slotline.apis.openai.keys import CLIENT
from slotline.apis.openai.service import Service
from slotline.apis.openai.streams import ClientGone, check_content_type, read_body
from slotline.engine import Engine

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request whose head and body are read.

    Attributes:
        engine: ready to answer.
        data: the body.
        answer_id: made up here, never seen before.
        request_id: the caller's own, or the answer's id.
        client: whose share of the queue it takes.
    """

    engine: Engine
    data: bytes
    answer_id: str
    request_id: str
    client: str | None


class Post(ABC):
    """POST a JSON body, get JSON or a stream. Plain ASGI, so that a host's own error pages never answer for it."""

    prefix = ""  # of the ids of answers
    renamed: Mapping[str, str] = {}  # the engine's name of a field -> this route's, for errors

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answer_id = self.prefix + uuid.uuid4().hex
        request_id: str | None = answer_id
        try:
            if scope["method"] != "POST":
                raise wrong_method(scope["method"], ("POST",))
            headers = Headers(scope=scope)
            request_id = _checked_id(headers.get("x-request-id")) or answer_id
            engine = self.service.ready()
            check_content_type(headers.get("content-type"))
            data = await read_body(receive, self.service.settings)
            reply = await self.reply(
                Asked(engine=engine, data=data, answer_id=answer_id, request_id=request_id, client=_client(scope))
            )
        except ClientGone:
            return
        except Exception as error:
            await send_error(send, to_api_error(error, str(request_id), self.renamed), request_id)
            return
        if isinstance(reply, Exchange):
            await reply.run(receive, send)
        else:
            await send_json(send, reply, headers={"X-Request-Id": request_id})

    @abstractmethod
    async def reply(self, asked: Asked) -> Exchange | Mapping[str, Any]:
        """Return the body of the answer, or the exchange with the engine that gives it.

        Raises:
            ApiError, SlotlineError: the request is refused.
        """


def _checked_id(given: str | None) -> str | None:
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise ApiError(
            400, "X-Request-Id is not usable; allowed: 1 to 128 of A-Z a-z 0-9 . _ : -", param="X-Request-Id"
        )
    return given


def _client(scope: Scope) -> str | None:
    """Return whose share of the queue a request takes: the key it came with, or its address."""
    peer = scope.get("client")
    return scope.get(CLIENT) or (str(peer[0]) if peer else None)
