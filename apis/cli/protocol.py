"""uvicorn's HTTP protocol with the limits that it lacks: size and time of a request's head, connections left unread.

httptools keeps a header that has not ended in memory for as long as it grows, and uvicorn closes a
connection only once all of an answer has been read. Both are bounded here, by a look at all
connections once a second rather than by a timer each.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slotline.apis.openai.errors import ApiError
from slotline.apis.openai.middleware import DROP

FRAMING = 8  # bytes of chunk framing that one byte of body may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one connection.

    Attributes:
        head_bytes, headers: of a request line and its headers.
        head_seconds: for a head to arrive, from the connection or from its first byte.
        unread_seconds: for a client to read the rest of an answer that is over.
    """

    head_bytes: int = 64 * 1024
    headers: int = 200
    head_seconds: float = 30.0
    unread_seconds: float = 30.0


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, and the limits."""

    def __init__(self, app: Any, *, limits: Limits, **options: Any) -> None:
        super().__init__(app, http=GuardedProtocol, **options)
        self.limits = limits


class HeadRefused(Exception):
    """A request's head is over a limit."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: ServerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._limits = config.limits
        self._head_since: float | None = None  # while a head is awaited or arriving
        self._closing_since: float | None = None
        self._received = self._head = self._headers = self._body = 0
        self._refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._head_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse what it would have to keep."""
        self._received += len(data)
        super().data_received(data)
        if self._received - FRAMING * self._body > self._limits.head_bytes and not self.transport.is_closing():
            self._refusal = f"the head of the request is longer than {self._limits.head_bytes} bytes"
            self.send_400_response(self._refusal)

    def on_message_begin(self) -> None:
        """Begin to count; let the application end the connection."""
        super().on_message_begin()
        self._received = self._head = self._headers = self._body = 0
        self._head_since = self.loop.time()
        cast("dict[str, Any]", self.scope)["extensions"] = {DROP: self.drop}

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, of the head or of a trailer."""
        self._headers += 1
        if self._headers > self._limits.headers:
            self._refuse(f"the request has more than {self._limits.headers} headers")
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop waiting for the head."""
        self._head_since = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count what the application gets."""
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin anew."""
        self._received = self._body = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is no HTTP, or over a limit, in the envelope of all errors."""
        status = 400 if self._refusal is None else 431
        error = ApiError(status, self._refusal or msg, code="bad_http" if status == 400 else "head_too_large")
        self._answer(error)

    def drop(self) -> None:
        """End the connection now; the application is done with it."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()

    def look(self, now: float) -> None:
        """Give up a connection that is over a time limit."""
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since >= self._limits.unread_seconds:
                self.transport.abort()
        elif self._head_since is not None and now - self._head_since >= self._limits.head_seconds:
            message = f"the request did not arrive within {self._limits.head_seconds:g} seconds"
            self._answer(ApiError(408, message, code="head_timeout"))

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self._limits.head_bytes:
            self._refuse(f"the head of the request is longer than {self._limits.head_bytes} bytes")

    def _refuse(self, message: str) -> None:
        self._refusal = message
        raise HeadRefused(message)  # the parser stops, and uvicorn sends a 400 response

    def _answer(self, error: ApiError) -> None:
        """Write a whole answer and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.drop()  # in the middle of another answer nothing can be said
            return
        body = orjson.dumps(error.envelope())
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(STATUS_LINE[error.status] + head + str(len(body)).encode() + b"\r\n\r\n" + body)
        self.transport.close()
