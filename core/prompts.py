"""From what a caller hands over as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

from slotline.errors import ChatTemplateError, InvalidParameter
from slotline.model import Message, Model
from slotline.text import Vocabulary

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Message]

LONG_PROMPT = 4096  # characters; longer texts are encoded off the event loop
WORKERS = 2  # threads for templates and long prompts


class PromptEncoder:
    """Encode prompts for one model; templates and long texts go to a few worker threads."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._workers = anyio.CapacityLimiter(WORKERS)

    async def encode_all(self, prompts: Sequence[Prompt], chat_options: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each prompt: a text, token ids, or chat messages.

        Raises:
            InvalidParameter: there is no prompt, or one is none of these.
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        if isinstance(prompts, str) or not prompts:
            raise InvalidParameter.of("prompt", prompts, "a list of prompts, at least one")
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
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            return await self.encode_chat(cast("list[Message]", items), chat_options)
        if set(map(type, items)) <= {int}:  # a long prompt takes a tenth of the loop's time
            return cast("list[int]", items)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise InvalidParameter.of("prompt", item, "a text, a list of token ids, or a list of chat messages")
        return cast("list[int]", items)

    async def _in_worker(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, limiter=self._workers)
