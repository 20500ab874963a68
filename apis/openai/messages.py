"""Chat messages: what clients send, checked and brought into the one form that templates read."""

from __future__ import annotations

from typing import Any

from slotline.errors import InvalidParameter, RequestError

ROLES = ("assistant", "developer", "system", "tool", "user")
PART_JOINT = "\n"  # between the text parts of one message
MAX_MESSAGES = 10_000

# Kept for templates that read them.
PASSED_ON = {"name": str, "reasoning_content": str, "tool_call_id": str, "tool_calls": list}


def normalise(messages: str | list[Any]) -> list[dict[str, Any]]:
    """Return messages with a known role and text content; a plain string is a user's message.

    Raises:
        RequestError: naming the message and the field at fault.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not 1 <= len(messages) <= MAX_MESSAGES:
        message = f"messages has {len(messages)} messages; allowed: 1 to {MAX_MESSAGES}"
        raise RequestError(message, param="messages")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(messages)]


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _wrong(where, item, "an object with role and content")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role", role, ", ".join(ROLES))
    message: dict[str, Any] = {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    for name, value in item.items():
        if name in ("role", "content") or value is None:
            continue
        kind = PASSED_ON.get(name)
        if kind is None:
            raise RequestError(f"{where} has the unknown field {name[:80]!r}", param="messages")
        if not isinstance(value, kind):
            raise _wrong(f"{where}.{name}", value, "a string" if kind is str else "a list")
        message[name] = value
    return message


def _text(content: Any, where: str) -> str:
    """Return content as one text: null is '', parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "a string, a list of text parts, or null")
    return PART_JOINT.join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(where, part, "an object with type and text")
    if part.get("type") != "text":
        raise _wrong(f"{where}.type", part.get("type"), "text")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", text, "a string")
    other = next((name for name in part if name not in ("type", "text")), None)
    if other is not None:
        raise RequestError(f"{where} has the unknown field {other[:80]!r}", param="messages")
    return text


def _wrong(where: str, value: object, allowed: str) -> RequestError:
    return InvalidParameter(InvalidParameter.of(where, value, allowed).message, param="messages")
