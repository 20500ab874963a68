"""From what the engine gives to what OpenAI's clients read, whole and in pieces.

A stream's events differ in little: each answer encodes what is constant once, and puts a piece
of text between two byte strings. Only events that carry more go through a dict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from slotline.apis.openai.errors import ApiError, to_json
from slotline.apis.openai.jobs import Job
from slotline.apis.openai.logprobs import CompletionLogprobs, chat_content, joined, mean_logprob, prompt_logprobs
from slotline.apis.openai.streams import EVENT_STREAM_HEADERS
from slotline.logprobs import Logprobs
from slotline.plan import LogprobColumns
from slotline.request import Completion, Notice, Output, Usage
from slotline.text import Vocabulary

DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The answer to one request in one surface's shapes."""

    stream_headers: Sequence[tuple[bytes, bytes]]

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    def piece(self, output: Output) -> bytes:
        """Return the event for a piece; b"" where it has nothing to show."""

    def end(self, usage: Usage) -> bytes:
        """Return what ends a stream."""

    def failed(self, error: ApiError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def notices_body(warnings: Sequence[Notice]) -> list[dict[str, Any]]:
    """Return warnings as JSON."""
    return [{"code": w.code, "param": w.param, "message": w.message} for w in warnings]


class _Base(ABC):
    """What both surfaces share: identity, choice numbers, warnings, the frame of an event."""

    kind = ""  # "object" of a whole answer
    chunk_kind = ""  # and of an event
    stream_headers: Sequence[tuple[bytes, bytes]] = EVENT_STREAM_HEADERS
    before = b""  # what comes between the number of the choice and its text,
    after = b""  # and after the text, where an event carries nothing else

    def __init__(self, job: Job, answer_id: str, created: int, warnings: Sequence[Notice]) -> None:
        self.job = job
        self._head = {"id": answer_id, "object": self.kind, "created": created, "model": job.model}
        self._chunk = {**self._head, "object": self.chunk_kind}
        self._warnings = notices_body(warnings)
        self._unsent = self._warnings
        opening = b"data: " + to_json(self._chunk)[:-1] + b',"choices":[{"index":'
        count = job.params.n * len(job.prompts)
        self._starts = [opening + str(index).encode() + self.before for index in range(count)]
        self._end = self.after + b"}]" + (b',"usage":null' if job.include_usage else b"") + b"}\n\n"
        self._begun = [False] * count

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            self._whole_choice(choice, prompt_index, prompt_index * self.job.shown + position)
            for prompt_index, completion in enumerate(completions)
            for position, choice in enumerate(self._best(completion.choices or [completion]))
        ]
        body = {**self._head, "choices": choices, "usage": usage_body(usage)}
        return {**body, "warnings": self._warnings} if self._warnings else body

    def _best(self, choices: Sequence[Completion]) -> Sequence[Completion]:
        """Return the choices to show: the likeliest by token where more were made, best first."""
        if len(choices) <= self.job.shown:
            return choices
        return sorted(choices, key=mean_logprob, reverse=True)[: self.job.shown]

    def end(self, usage: Usage) -> bytes:
        """Return the last events: the usage of the whole stream where that was asked for, and the end mark."""
        if not self.job.include_usage:
            return DONE
        return b"data: " + to_json({**self._chunk, "choices": [], "usage": usage_body(usage)}) + b"\n\n" + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the error as the stream's last event."""
        return error.event()

    def piece(self, output: Output) -> bytes:
        """Return the event for a piece; b"" where it has nothing to show."""
        index = output.prompt_index * self.job.params.n + output.index
        if self._begun[index] and output.finish_reason is None and output.prompt_logprobs is None:
            if not output.text and (output.logprobs is None or not output.token_ids):
                return b""
            if output.logprobs is None:
                return self._starts[index] + to_json(output.text) + self._end
        first, self._begun[index] = not self._begun[index], True
        return self._event(self._piece_choice(output, index, first))

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._chunk, "choices": [choice]}
        if self.job.include_usage:
            chunk["usage"] = None
        if self._unsent:
            chunk["warnings"], self._unsent = self._unsent, []
        return b"data: " + to_json(chunk) + b"\n\n"

    @abstractmethod
    def _whole_choice(self, choice: Completion, prompt_index: int, index: int) -> dict[str, Any]:
        """Shape one choice."""

    @abstractmethod
    def _piece_choice(self, output: Output, index: int, first: bool) -> dict[str, Any]:
        """Shape one choice."""


class ChatAnswer(_Base):
    """An answer of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    before = b',"delta":{"content":'
    after = b'},"logprobs":null,"finish_reason":null'

    def _whole_choice(self, choice: Completion, prompt_index: int, index: int) -> dict[str, Any]:
        body = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return _with_prompt_logprobs(body, choice, self.job)

    def _piece_choice(self, output: Output, index: int, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": output.text} if first else {}
        if output.text:
            delta["content"] = output.text
        body: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            body["stop_reason"] = output.stop_reason
        return _with_prompt_logprobs(body, output, self.job)

    def _logprobs(self, part: Completion | Output) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        return {"content": chat_content(part.logprobs, self.job.params.logprobs or 0), "refusal": None}


class CompletionAnswer(_Base):
    """An answer of /v1/completions.

    Args:
        echoes: the text of each prompt, where the request asked to see it.
        prompt_ids: the ids of each prompt.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"
    before = b',"text":'
    after = b',"logprobs":null,"finish_reason":null'

    def __init__(
        self,
        job: Job,
        answer_id: str,
        created: int,
        warnings: Sequence[Notice],
        *,
        vocabulary: Vocabulary,
        echoes: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(job, answer_id, created, warnings)
        self._echoes = echoes
        self._prompt_ids = prompt_ids
        self._vocabulary = vocabulary
        skip = job.params.skip_special_tokens
        self._counters = [CompletionLogprobs(vocabulary, skip) for _ in self._begun]
        # Logprobs of a prompt come in parts, with its first choice; no choice can begin without them.
        self._rows: list[Logprobs | None] = [None for _ in prompt_ids]
        told = {notice.param for notice in warnings}
        waits = job.echo_logprobs and "prompt_logprobs" not in told
        self._waiting = {p: _Waiting() for p in range(len(prompt_ids))} if waits else {}

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        self._rows = [completion.prompt_logprobs for completion in completions]
        return super().whole(completions, usage)

    def piece(self, output: Output) -> bytes:
        """Return the events for a piece; b"" where it has nothing to show, or has to wait."""
        waiting = self._waiting.get(output.prompt_index)
        if waiting is None:
            return super().piece(output)
        if output.prompt_logprobs is not None:
            waiting.columns.append(output.prompt_logprobs.columns)
            output.prompt_logprobs = None
        waiting.outputs.append(output)
        if sum(map(len, waiting.columns)) < len(self._prompt_ids[output.prompt_index]):
            return b""
        del self._waiting[output.prompt_index]
        self._rows[output.prompt_index] = Logprobs(LogprobColumns.concat(waiting.columns), self._vocabulary)
        return b"".join(super(CompletionAnswer, self).piece(held) for held in waiting.outputs)

    def _whole_choice(self, choice: Completion, prompt_index: int, index: int) -> dict[str, Any]:
        body = self._choice(choice, prompt_index, index, first=True)
        return {**body, "stop_reason": choice.stop_reason}

    def _piece_choice(self, output: Output, index: int, first: bool) -> dict[str, Any]:
        body = self._choice(output, output.prompt_index, index, first=first)
        if output.finish_reason is not None:
            body["stop_reason"] = output.stop_reason
        return body

    def _choice(self, part: Completion | Output, prompt_index: int, index: int, *, first: bool) -> dict[str, Any]:
        echo = first and self.job.echo
        body = {
            "index": index,
            "text": self._echoes[prompt_index] + part.text if echo else part.text,
            "logprobs": self._both_logprobs(part, prompt_index, index, echo),
            "finish_reason": part.finish_reason,
        }
        return _with_prompt_logprobs(body, part, self.job)

    def _both_logprobs(
        self, part: Completion | Output, prompt_index: int, index: int, echo: bool
    ) -> dict[str, Any] | None:
        """Return the logprobs of a piece, after those of an echoed prompt."""
        counter, parts, rows = self._counters[index], [], self._rows[prompt_index]
        if echo and self.job.echo_logprobs and (part.logprobs is not None or rows is not None):
            parts.append(counter.piece(self._prompt_ids[prompt_index], rows, shown=True))
        if part.logprobs is not None and not self.job.hides_logprobs:
            parts.append(counter.piece(part.token_ids, part.logprobs))
        return joined(parts) if parts else None


class _Waiting:
    """Pieces that wait for the logprobs of their prompt."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.columns: list[LogprobColumns] = []


def _with_prompt_logprobs(body: dict[str, Any], part: Completion | Output, job: Job) -> dict[str, Any]:
    """Add the extension ``prompt_logprobs`` where it was asked for by that name."""
    if job.params.prompt_logprobs is None or job.echo_logprobs or part.prompt_logprobs is None:
        return body
    return {**body, "prompt_logprobs": prompt_logprobs(part.prompt_logprobs)}
