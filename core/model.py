"""What the core needs of a model: text to ids, ids to bytes, messages to ids, a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """Text to token ids, and the bytes of each id."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids that encode or decode."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Return ids that are control tokens, left out of text unless asked for."""

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the ids of ``text``.

        Args:
            parse_special: control tokens spelt in the text become their ids.
            add_special: put the begin token in front where the model wants one.
        """

    def token_bytes(self) -> Sequence[bytes]:
        """Return [vocab_size] the true bytes of each id; a control token's are its spelling."""


class ChatFormat(Protocol):
    """Messages to a prompt, for one model."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt text.

        Raises:
            ChatTemplateError: the template refuses the messages, with its own words.
        """

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Return the prompt's ids; control tokens spelt in message content stay text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An opened model: everything but the weights on a device.

    Attributes:
        name: as the user asked for it.
        tokenizer: text to ids.
        chat: messages to ids; None where the model ships no template.
        vocab_size: width of the logits, at least the tokenizer's.
        context_length: longest sequence the model was made for.
        eos_ids: end tokens: the union of config, generation_config and tokenizer.
        generation: the model's own sampling defaults, by SamplingParams name.
        architecture: such as "llama"; "" for models without weights.
        checkpoint: the backend's side: config and tensors, opaque to the core.
        source: where it came from, for people.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    chat: ChatFormat | None = None
    eos_ids: frozenset[int] = frozenset()
    generation: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = ""
    checkpoint: Any = None
    source: str = ""
