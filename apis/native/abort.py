"""/abort: end an answer from outside the connection that waits for it."""

from __future__ import annotations

from typing import Any

from slotline.apis.native.sessions import Sessions
from slotline.apis.openai.errors import ApiError
from slotline.apis.openai.models import Body, parse
from slotline.apis.openai.post import Asked, Post
from slotline.apis.openai.service import Service


class AbortBody(Body):
    """Body of POST /abort: which answer."""

    request_id: str | None = None
    session_id: int | None = None


class Abort(Post):
    """Abort by the id of an answer, by the caller's own X-Request-Id, or by session."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        super().__init__(service)
        self._sessions = sessions

    async def reply(self, asked: Asked) -> dict[str, Any]:
        """Return how many requests were aborted; one that has ended, or never was, is none."""
        body = parse(AbortBody, asked.data)
        if (body.request_id is None) == (body.session_id is None):
            state = "missing" if body.request_id is None else "given, and so is session_id"
            message = f"request_id is {state}; allowed: either request_id or session_id"
            raise ApiError(400, message, param="request_id", code="invalid_parameter")
        if body.request_id is not None:
            count = self.service.running.abort(body.request_id, asked.client)
        else:
            count = int(self._sessions.abort((asked.client, body.session_id)))
        if not count and self.service.settings.processes > 1:
            message = (
                f"no such answer is being given by this process, one of {self.service.settings.processes}; "
                "on another connection the request may reach the one that gives it"
            )
            raise ApiError(404, message, param="request_id", code="not_in_this_process")
        return {"aborted": count}
