"""What surrounds every route of a server: request ids, access log, limits of size, connections that are given up."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slotline.apis.openai.errors import ApiError, send_error
from slotline.apis.openai.keys import CLIENT
from slotline.tracing import trace_headers

access_log = logging.getLogger("slotline.access")

DROP = "slotline.drop"  # ASGI extension: end the connection now, whatever it has not read yet


class Frame:
    """The outermost layer: one id and one line of the log for each request; half an answer ends its connection.

    A line names method, path, status, sizes and times, never a body, a query or a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        headers = Headers(scope=scope)
        if "traceparent" in headers:
            trace_headers.set({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            if exchange.status and not exchange.complete:
                _drop_of(scope)()  # a slow reader's buffer would be held for as long as it likes
            if access_log.isEnabledFor(logging.INFO):
                exchange.log()


class _Exchange:
    """One request as its answer passes by."""

    __slots__ = ("_began", "_first", "_id", "_scope", "_send", "_sent", "complete", "status")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self._first = 0.0
        self._sent = 0
        self._id = ""
        self.status = 0
        self.complete = False

    async def send(self, message: Message) -> None:
        """Pass a message on, and note what the log will say of it."""
        if message["type"] == "http.response.body":
            self._sent += len(message.get("body", b""))
            await self._send(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            self.status, self._first = message["status"], time.monotonic()
            message = self._with_id(message)
        await self._send(message)

    def _with_id(self, message: Message) -> Message:
        """Note the answer's request id; give it one where its route did not."""
        headers = list(message.get("headers", ()))
        given = next((value for name, value in headers if name.lower() == b"x-request-id"), None)
        if given is not None:
            self._id = given.decode("latin-1")
            return message
        self._id = f"req-{uuid.uuid4().hex}"
        return {**message, "headers": [*headers, (b"x-request-id", self._id.encode())]}

    def log(self) -> None:
        """Write the line."""
        scope, now = self._scope, time.monotonic()
        peer = scope.get("client")
        fields = {
            "request_id": self._id or None,
            "client": scope.get(CLIENT) or (peer[0] if peer else None),
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status or None,
            "complete": self.complete,
            "bytes": self._sent,
            "first_ms": round((self._first - self._began) * 1e3, 2) if self._first else None,
            "ms": round((now - self._began) * 1e3, 2),
        }
        access_log.info(
            "%s %s %s %s", fields["method"], fields["path"], fields["status"], fields["ms"], extra={"fields": fields}
        )


class LimitBody:
    """Refuse a body that says it is too long before any of it is read. Routes count what they read, too."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, or go on."""
        if scope["type"] == "http":
            declared = Headers(scope=scope).get("content-length", "")
            if declared.isdigit() and int(declared) > self._limit:
                text = f"the body is longer than {self._limit} bytes"
                await send_error(send, ApiError(413, text, code="body_too_large", headers={"Connection": "close"}))
                return
        await self._app(scope, receive, send)


def _drop_of(scope: Scope) -> Callable[[], None]:
    """Return what ends the connection, where the server offers it."""
    drop: Callable[[], None] = scope.get("extensions", {}).get(DROP, _nothing)
    return drop


def _nothing() -> None:
    """Do nothing."""
