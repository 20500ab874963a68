"""A request in the caller's hands: iterate over its output, or wait for all of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from slotline.logprobs import Logprobs
from slotline.mailbox import Choice, Mailbox
from slotline.plan import LogprobColumns
from slotline.request import Completion, Notice, Output, SequenceRequest, Usage
from slotline.text import Stops, TextStream, Vocabulary

if TYPE_CHECKING:
    from slotline.params import SamplingParams
    from slotline.turns import Bell


class RequestHandle:
    """One submitted request: one or more prompts, n choices of each.

    Iterate over it for pieces as they come, or await ``completions()``. Leaving the iteration
    early, by ``break`` and ``aclose()``, an exception or cancellation, aborts the request at
    once; so does ``abort()``.

    Attributes:
        request_id: as given, or made up.
        params: resolved sampling parameters.
        prompt_token_ids: one list per prompt.
        choices: prompt-major.
        warnings: what the backend does not honour.
        created: wall-clock time of submission, in seconds.
        started: monotonic time of submission.
        cached_tokens: prompt tokens that were found in the prefix cache.
        error: what ended it, if anything did.
        notes: what observers keep of it, from one event to the next.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: list[list[int]],
        vocabulary: Vocabulary,
        warnings: list[Notice],
        bell: Bell,
        client: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.warnings = warnings
        self.client = client
        self.box = Mailbox(vocabulary, bell)
        self.choices: list[Choice] = []
        self.created = time.time()
        self.started = time.monotonic()
        self.cached_tokens = 0
        self.error: BaseException | None = None
        self.notes: dict[str, Any] = {}
        self._vocabulary = vocabulary
        self._abort: Callable[[RequestHandle], None] = lambda _: None

    # --- for the engine ---------------------------------------------------------------

    def attach(self, sequences: Sequence[SequenceRequest], abort: Callable[[RequestHandle], None]) -> None:
        """Expect the output of these sequences, prompt-major; ``abort`` is what ending early calls."""
        params = self.params
        stops = Stops(params.stop or ())
        for number, sequence in enumerate(sequences):
            stream = TextStream(
                self._vocabulary,
                stops,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
                min_tokens=params.min_tokens or 0,
            )
            prompt_index, index = divmod(number, params.n)
            choice = Choice(self.box, stream, seq_id=sequence.seq_id, index=index, prompt_index=prompt_index)
            choice.wants_logprobs = sequence.logprobs is not None
            if sequence.prompt_logprobs is not None:
                choice.expect_prompt_logprobs()
            self.choices.append(choice)
        self._abort = abort

    @property
    def finished(self) -> bool:
        """Tell whether every choice has ended."""
        return all(choice.done for choice in self.choices)

    # --- for the caller ---------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """Return the tokens so far; each prompt counts once, whatever n is."""
        return Usage(
            prompt_tokens=sum(map(len, self.prompt_token_ids)),
            completion_tokens=sum(choice.total for choice in self.choices),
            cached_tokens=self.cached_tokens,
        )

    def abort(self) -> None:
        """End the request now; its slots and blocks are free when this returns."""
        self._abort(self)

    async def pieces(self, *, patient: bool = False) -> AsyncGenerator[list[Output], None]:
        """Yield what is new, all choices at once; abort if left early.

        Args:
            patient: only when a choice has ended.

        Raises:
            SlotlineError: the request ended with an error.
        """
        try:
            left = len(self.choices)
            while left:
                outputs = await self.box.get(patient=patient)
                left -= sum(output.finish_reason is not None for output in outputs)
                yield outputs
            if self.error is not None:
                raise self.error
        finally:
            if not self.finished:
                self.abort()

    async def __aiter__(self) -> AsyncIterator[Output]:
        pieces = self.pieces()
        try:
            async for outputs in pieces:
                for output in outputs:
                    yield output
        finally:
            if not self.finished:
                self.abort()  # before anything that could be cancelled again
            await pieces.aclose()

    async def completions(self) -> list[Completion]:
        """Wait for the end; return one Completion per prompt, with all its choices."""
        gathered = [_Gathered() for _ in self.choices]
        at = {(c.prompt_index, c.index): g for c, g in zip(self.choices, gathered, strict=True)}
        async with aclosing(self.pieces(patient=True)) as pieces:
            async for outputs in pieces:
                for output in outputs:
                    at[output.prompt_index, output.index].add(output)
        return [self._completion(p, at) for p in range(len(self.prompt_token_ids))]

    def _completion(self, prompt_index: int, at: dict[tuple[int, int], _Gathered]) -> Completion:
        own = [at[c.prompt_index, c.index] for c in self.choices if c.prompt_index == prompt_index]
        prompt = self.prompt_token_ids[prompt_index]
        single = len(self.prompt_token_ids) == 1
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=sum(len(g.token_ids) for g in own),
            cached_tokens=self.usage.cached_tokens if single else 0,
        )
        choices = [
            Completion(
                text="".join(g.texts),
                token_ids=g.token_ids,
                finish_reason=g.last.finish_reason if g.last else None,
                stop_reason=g.last.stop_reason if g.last else None,
                index=index,
                logprobs=self._joined(g.columns) if g.columns else None,
                prompt_token_ids=prompt,
                prompt_logprobs=self._joined(g.prompt_columns) if g.prompt_columns else None,
                usage=usage,
                warnings=self.warnings,
                request_id=self.request_id,
                embedding=g.last.embedding if g.last else None,
            )
            for index, g in enumerate(own)
        ]
        choices[0].choices = choices
        return choices[0]

    def _joined(self, columns: list[LogprobColumns]) -> Logprobs:
        return Logprobs(LogprobColumns.concat(columns), self._vocabulary)


class _Gathered:
    """The pieces of one choice."""

    __slots__ = ("columns", "last", "prompt_columns", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.columns: list[LogprobColumns] = []
        self.prompt_columns: list[LogprobColumns] = []
        self.last: Output | None = None

    def add(self, output: Output) -> None:
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.last = output
        if output.logprobs is not None:
            self.columns.append(output.logprobs.columns)
        if output.prompt_logprobs is not None:
            self.prompt_columns.append(output.prompt_logprobs.columns)
