"""From what a caller hands over as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from slotline.errors import ChatTemplateError, InvalidParameter
from slotline.model import Message, Model
from slotline.text import Vocabulary

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Message]

KINDS = "a text, a list of token ids, or a list of chat messages"
RAW = bytes | bytearray | memoryview  # sequences of integers, but no token ids
LONG_PROMPT = 4096  # characters; longer texts are encoded off the event loop
WORKERS = 2  # threads for templates and long prompts


def check_prompts(prompts: Any) -> None:
    """Refuse what is no list of prompts.

    Raises:
        InvalidParameter: it is a text or nothing of the kind, or there is no prompt.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | RAW) or not len(prompts):
        raise InvalidParameter.of("prompt", prompts, "a list of prompts, at least one")


def _listed(prompt: Any) -> list[Any]:
    """Return the items of a prompt that is no text: a sequence, or an array of one dimension."""
    items = prompt.tolist() if getattr(prompt, "ndim", 0) == 1 else prompt
    if isinstance(prompt, RAW) or not isinstance(items, Sequence):
        raise InvalidParameter.of("prompt", prompt, KINDS)
    return list(items)


class PromptEncoder:
    """Encode prompts for one model; templates and long texts go to a few worker threads."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._workers = anyio.CapacityLimiter(WORKERS)

    async def encode_all(self, prompts: Sequence[Prompt], chat_options: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each prompt: a text, token ids, or chat messages.

        Raises:
            InvalidParameter: one is none of these.
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        return [await self._encode(prompt, chat_options) for prompt in prompts]

    async def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Return the token ids of chat messages."""
        chat = self._model.chat
        if chat is None:
            raise ChatTemplateError(
                f"model {self._model.name!r} has no chat template; give one with chat_template, or send plain prompts",
                param="messages",
            )
        return await self._in_worker(lambda: chat.encode(messages, **options))

    async def encode_text(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        encode = self._model.tokenizer.encode
        if len(text) <= LONG_PROMPT:
            return encode(text, parse_special=parse_special, add_special=add_special)
        return await self._in_worker(lambda: encode(text, parse_special=parse_special, add_special=add_special))

    async def decode(self, vocabulary: Vocabulary, token_ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of token ids."""
        if len(token_ids) <= LONG_PROMPT:
            return vocabulary.decode(token_ids, skip_special)
        return await self._in_worker(lambda: vocabulary.decode(token_ids, skip_special))

    async def _encode(self, prompt: Prompt, chat_options: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return await self.encode_text(prompt)
        items = _listed(prompt)
        if items and isinstance(items[0], Mapping):
            return await self.encode_chat(items, chat_options)
        if set(map(type, items)) <= {int}:  # a long prompt takes a tenth of the loop's time
            return items
        for item in items:
            if isinstance(item, bool) or not isinstance(item, Integral):
                raise InvalidParameter.of("prompt", item, KINDS)
        return [int(item) for item in items]

    async def _in_worker(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, limiter=self._workers)
