"""Bring chat messages into the one shape that templates expect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotline.errors import InvalidParameter
from slotline.model import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with string contents and parsed tool arguments; the originals stay as they are.

    Missing or null content becomes "". Text parts are joined with a newline. Arguments of tool calls, JSON
    text in OpenAI's shape, become mappings, since that is what templates print.

    Raises:
        InvalidParameter: naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidParameter.of("messages", messages, "a list of messages")
    if not messages:
        raise InvalidParameter.of("messages", messages, "a list of at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, at: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(at, message, "an object with role and content")
    if message.get("role") not in ROLES:
        raise _refused(f"{at}.role", message.get("role"), ", ".join(ROLES))
    plain = {str(key): value for key, value in message.items()}
    plain["content"] = _content(plain.get("content"), f"{at}.content")
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _content(content: object, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _refused(at, content, "a string, null, or a list of text parts")
    return "\n".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(at, part, "an object with type and text")
    if part.get("type") != "text":
        raise _refused(f"{at}.type", part.get("type"), "text", "This model reads nothing else.")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{at}.text", part.get("text"), "a string")
    return str(part["text"])


def _tool_call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("arguments"), str)
    ):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # some models are shown their own broken JSON on purpose
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _refused(field: str, value: object, allowed: str, advice: str = "") -> InvalidParameter:
    error = InvalidParameter.of(field, value, allowed, advice)
    error.param = "messages"
    return error


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with ``change`` applied to each string in it; keys stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value
