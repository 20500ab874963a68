"""The vocabulary of a request: what goes in, what comes out, and what is told on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slotline.plan import FloatArray, IntArray

if TYPE_CHECKING:
    from slotline.logprobs import Logprobs
    from slotline.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that travels with the answer: something was asked for that the backend lacks."""

    code: str
    param: str
    message: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, summed over its choices; the prompt counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Return prompt plus completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence as the core runs it: token ids in, resolved parameters, nothing of text.

    Attributes:
        seq_id: unique in the engine, rising with arrival.
        token_ids: [P] int32 prompt.
        params: resolved; n is not looked at any more.
        seed: of this choice.
        stop_ids: end tokens and stop ids.
        max_tokens: resolved.
        bad_words: token sequences.
        priority: lower runs first.
        client: whose share of the queue it takes.
        deadline: seconds from submission by which it must be finished.
        cache_salt: part of the prefix-cache identity.
        adapter: 0 is none.
        logprobs, prompt_logprobs: widths after the capability check; None if not wanted.
        embed: the prompt's last hidden state is wanted, with max_tokens 0.
        leader: the sequence with the same prompt whose blocks this one should start from; None if it has none.
    """

    seq_id: int
    token_ids: IntArray
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    max_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    client: str | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    adapter: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embed: bool = False
    leader: int | None = None

    @property
    def max_len(self) -> int:
        """Return the longest this sequence may become, prompt and output."""
        return len(self.token_ids) + self.max_tokens


@dataclass(slots=True)
class Output:
    """A piece of one choice: what is new since the piece before.

    Attributes:
        index: the choice, 0 to n - 1.
        prompt_index: which prompt of a list.
        text: new text, trimmed by stop strings.
        token_ids: new ids, every sampled token.
        logprobs: one entry per new id, or None.
        finish_reason: set on the last piece of a choice.
        stop_reason: the string or id that matched; None for the model's end token.
        prompt_logprobs: new prompt positions, if asked for; the first of all is None.
        embedding: [C] of the prompt, if asked for.
    """

    index: int
    prompt_index: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: Logprobs | None = None
    embedding: FloatArray | None = None


@dataclass(slots=True)
class Completion:
    """A finished answer. With n > 1 this is the first choice, and ``choices`` holds all."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: Logprobs | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    warnings: list[Notice] = field(default_factory=list)
    request_id: str = ""
    embedding: FloatArray | None = None
    choices: list[Completion] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What request observers see. ``kind`` is "admitted", "first_token" or "finished".

    ``extra`` is one dict for all events of a request: observers keep there, under names of their own, what
    they need from one to the next.
    """

    kind: Literal["admitted", "first_token", "finished"]
    request_id: str
    client: str | None
    time: float
    prompt_tokens: int
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    extra: dict[str, Any] = field(default_factory=dict)
