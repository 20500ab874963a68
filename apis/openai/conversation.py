"""A conversation as a prompt: its messages, and what the template is told beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotline.apis.openai.messages import normalise
from slotline.apis.openai.models import ConversationBody
from slotline.engine import Engine
from slotline.errors import RequestError

# Arguments of a template that the server sets; a request may not replace them through kwargs.
_RESERVED = frozenset({"add_generation_prompt", "chat_template", "continue_final_message", "messages", "tools"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a model is to answer, or to go on with.

    Attributes:
        messages: without the one that is to be continued.
        options: arguments of the chat template.
        opening: how the assistant's message begins, where a request gives that and wants the rest.
    """

    messages: list[dict[str, Any]]
    options: Mapping[str, Any] | None = None
    opening: str | None = None

    @classmethod
    def of(cls, messages: str | list[Any], body: ConversationBody) -> Conversation:
        """Read what a body says.

        Raises:
            RequestError: naming the field at fault.
        """
        plain = normalise(messages)
        options = _template_options(body)
        opening = _take_opening(body, plain) if body.continue_final_message else None
        return cls(plain, options, opening)

    async def encode(self, engine: Engine) -> list[int]:
        """Return the prompt's token ids."""
        ids = await engine.chat_prompt(self.messages, **(self.options or {}))
        if self.opening is None:
            return ids
        return ids + await engine.tokenize(self.opening, parse_special=False, add_special=False)


def _template_options(body: ConversationBody) -> dict[str, Any] | None:
    options = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in _RESERVED:
            message = f"chat_template_kwargs has {name!r}; allowed: variables of the template other than that"
            raise RequestError(message, param="chat_template_kwargs")
    if body.add_generation_prompt is not None and not body.continue_final_message:
        options["add_generation_prompt"] = body.add_generation_prompt
    return options or None


def _take_opening(body: ConversationBody, messages: list[dict[str, Any]]) -> str:
    """Take the assistant's last message, which is to be continued, off the others; return its text."""
    allowed = None
    if body.add_generation_prompt:
        allowed = "without add_generation_prompt"
    elif len(messages) < 2 or messages[-1]["role"] != "assistant":
        allowed = "where the last of several messages is the assistant's"
    if allowed is not None:
        message = f"continue_final_message is true; allowed: only {allowed}"
        raise RequestError(message, param="continue_final_message")
    text: str = messages.pop()["content"]
    return text
