"""What goes wrong, as HTTP: one envelope for everything, a status for each class of error."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Send

from slotline.errors import (
    ClientLimitExceeded,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineLost,
    EngineUnhealthy,
    NumericalError,
    OverloadError,
    RequestAborted,
    RequestError,
    SlotlineError,
)

logger = logging.getLogger("slotline.http")

JSON_TYPE = (b"content-type", b"application/json")
SHOWN = 120  # characters of a caller's own text that a message repeats

# First match wins, so subclasses come before their bases. Engine errors do not show their text:
# it may quote paths or tensors, and the log has it.
_STATUS: tuple[tuple[type[SlotlineError], int, str, str | None], ...] = (
    (RequestError, 400, "invalid_request_error", None),
    (ClientLimitExceeded, 429, "rate_limit_error", None),
    (OverloadError, 503, "overloaded_error", None),
    (DeadlineExceeded, 504, "timeout_error", None),
    (RequestAborted, 499, "aborted_error", None),
    (EngineClosed, 503, "unavailable_error", "the engine is closed or closing"),
    (EngineUnhealthy, 503, "unavailable_error", "the engine has failed and cannot run requests"),
    (EngineLost, 503, "unavailable_error", "the engine's process ended and is started again; try again"),
    (NumericalError, 500, "server_error", "the model gave no finite numbers for this request"),
    (EngineError, 500, "server_error", "the engine failed while it ran this request"),
)


class ApiError(Exception):
    """An answer other than success: a status and the fields of the envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - the envelope's own word
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        """Return the body that OpenAI clients parse."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def event(self) -> bytes:
        """Return the error as the last event of a stream that has begun."""
        return b"data: " + to_json(self.envelope()) + b"\n\n"


def to_api_error(error: BaseException, request_id: str, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Translate whatever was raised; what is not the caller's fault is logged with the request's id.

    Args:
        error: what was raised.
        request_id: told to the caller, so that the log can be searched for it.
        renamed: engine parameter -> the field that this route calls by another name.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, type_, hidden in _STATUS:
        if isinstance(error, kind):
            if hidden is not None:
                logger.error("request %s failed: %s: %s", request_id, type(error).__name__, error)
                text = f"{hidden} (request {request_id})"
                return ApiError(status, text, type=type_, code=error.code, headers=_retry(error))
            param, message = _renamed(getattr(error, "param", None), error.message, renamed or {})
            return ApiError(status, message, type=type_, param=param, code=error.code, headers=_retry(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"internal error (request {request_id})", type="server_error", code="internal_error")


def not_found(path: str) -> ApiError:
    """Build the error for a path that no route has."""
    return ApiError(404, f"there is no route {shorten(path)}", code="not_found")


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """Build the error for a model that is not served; it never says what lies on this machine."""
    listed = ", ".join(served)
    return ApiError(
        404, f"the model {shorten(name)!r} is not served here; served: {listed}", param="model", code="model_not_found"
    )


def wrong_method(method: str, allowed: tuple[str, ...]) -> ApiError:
    """Build the error for a method that a route does not have."""
    listed = ", ".join(allowed)
    message = f"the method is {shorten(method)}; allowed: {listed}"
    return ApiError(405, message, code="method_not_allowed", headers={"Allow": listed})


def shorten(text: str) -> str:
    """Return text of a caller's, short enough to be repeated in a message."""
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def to_json(value: Any) -> bytes:
    """Encode a JSON value; lone surrogates, which a tokenizer can produce, are replaced."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_printable(value))


async def send_json(
    send: Send,
    body: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a whole JSON answer."""
    await send_bytes(send, to_json(body), status=status, headers=headers, content_type=JSON_TYPE[1])


async def send_bytes(
    send: Send, data: bytes, *, content_type: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer of any type."""
    raw = [(b"content-type", content_type), (b"content-length", str(len(data)).encode())]
    raw += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ApiError, request_id: str | None = None) -> None:
    """Send an error as a whole answer."""
    headers = dict(error.headers)
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    await send_json(send, error.envelope(), status=error.status, headers=headers)


def _renamed(param: str | None, message: str, renamed: Mapping[str, str]) -> tuple[str | None, str]:
    if param is None or param not in renamed:
        return param, message
    field = renamed[param]
    return field, field + message.removeprefix(param) if message.startswith(param) else message


def _retry(error: SlotlineError) -> dict[str, str]:
    after = getattr(error, "retry_after", None)
    return {} if after is None else {"Retry-After": str(max(1, math.ceil(after)))}


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
