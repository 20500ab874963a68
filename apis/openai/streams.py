"""Writing to a client that may be slow or gone: a deadline for writes, a watch for the hang-up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
from starlette.types import Message, Receive, Send

from slotline.apis.openai.errors import ApiError, shorten
from slotline.apis.openai.service import Settings

EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx collects events before it passes them on
)


class ClientGone(Exception):
    """The client hung up: there is nobody left to tell."""


class TimedSend:
    """``send`` with a deadline that costs a clock reading a message, not a timer.

    A server's ``send`` waits while the client does not read. One timer a stream looks whether the
    write in progress began too long ago, and calls ``on_expiry``, which should cancel it.
    """

    __slots__ = ("_limit", "_loop", "_on_expiry", "_send", "_since", "_timer", "expired")

    def __init__(self, send: Send, limit: float, on_expiry: Callable[[], None]) -> None:
        self._send = send
        self._limit = limit
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(limit, self._look)
        self.expired = False

    async def __call__(self, message: Message) -> None:
        """Send one message.

        Raises:
            ClientGone: the server says so; many servers drop the message instead.
        """
        self._since = self._loop.time()
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error
        self._since = None

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        age = 0.0 if self._since is None else self._loop.time() - self._since
        if age >= self._limit:
            self.expired = True
            self._on_expiry()
        else:
            self._timer = self._loop.call_later(self._limit - age, self._look)


async def wait_for_hangup(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when the client is gone.

    Servers differ in what a send to a gone client does (nothing, or an error), so this listens.
    """
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except OSError:
        pass  # some servers say it so
    scope.cancel()


async def read_body(receive: Receive, settings: Settings) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: it is too long, or does not arrive in time.
        ClientGone: before the body was complete.
    """
    try:
        async with asyncio.timeout(settings.body_timeout):  # a fifth of the price of anyio's
            return await _read_all(receive, settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout:g} seconds"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None


async def _read_all(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            text = f"the body is longer than {limit} bytes"
            raise ApiError(413, text, code="body_too_large", headers={"Connection": "close"})
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def check_content_type(value: str | None) -> None:
    """Refuse what is not declared as JSON: a web page may send anything else across origins unasked.

    Raises:
        ApiError: 415.
    """
    kind = (value or "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = shorten(repr(kind)) if kind else "missing"
        raise ApiError(415, f"Content-Type is {shown}; allowed: application/json", code="wrong_content_type")
