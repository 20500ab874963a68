"""The unread output of one request: pieces merge while nobody reads them.

A future and a list instead of a stream: putting costs a few hundred nanoseconds a row, and a
slow reader holds at most what its own max_tokens allows.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from slotline.logprobs import Logprobs, Part
from slotline.plan import FloatArray, LogprobColumns
from slotline.request import Output

if TYPE_CHECKING:
    from slotline.request import FinishReason
    from slotline.text import TextStream, Vocabulary
    from slotline.turns import Bell


class Choice:
    """One sequence on the client's side: its text stream and what was not read yet."""

    __slots__ = (
        "box",
        "columns",
        "done",
        "embedding",
        "finish_reason",
        "first_time",
        "ids",
        "index",
        "last_time",
        "listed",
        "prompt_columns",
        "prompt_index",
        "seq_id",
        "stop_reason",
        "stream",
        "texts",
        "total",
        "wants_logprobs",
        "wants_prompt_logprobs",
    )

    def __init__(self, box: Mailbox, stream: TextStream, *, seq_id: int, index: int, prompt_index: int) -> None:
        self.box = box
        self.stream = stream
        self.seq_id = seq_id
        self.index = index
        self.prompt_index = prompt_index
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.columns: list[Part] = []
        self.prompt_columns: list[LogprobColumns] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.wants_logprobs = False
        self.wants_prompt_logprobs = False  # set by expect_prompt_logprobs
        self.listed = False  # whether the mailbox knows of unread output
        self.done = False
        self.embedding: FloatArray | None = None
        self.total = 0  # tokens so far
        self.first_time = 0.0
        self.last_time = 0.0  # when the newest token came

    def expect_prompt_logprobs(self) -> None:
        """Deliver prompt positions too; the first one never has values."""
        self.wants_prompt_logprobs = True
        self.prompt_columns.append(LogprobColumns.empty(1))

    def take(self, vocabulary: Vocabulary) -> Output:
        """Return what is unread as one piece, and begin a new one."""
        texts = self.texts
        output = Output(
            self.index,
            self.prompt_index,
            texts[0] if len(texts) == 1 else "".join(texts),
            self.ids,
            Logprobs.of(self.columns, vocabulary) if self.wants_logprobs else None,
            self.finish_reason,
            self.stop_reason,
            embedding=self.embedding,
        )
        self.ids, self.texts, self.listed = [], [], False
        if self.wants_logprobs:
            self.columns = []
        if self.prompt_columns:
            output.prompt_logprobs = Logprobs(LogprobColumns.concat(self.prompt_columns), vocabulary)
            self.prompt_columns = []
        return output


class Mailbox:
    """Where a request's choices leave their output and one reader takes it."""

    __slots__ = ("_bell", "_error", "_patient", "_ready", "_rung", "_vocabulary", "_waiter")

    def __init__(self, vocabulary: Vocabulary, bell: Bell) -> None:
        self._vocabulary = vocabulary
        self._bell = bell
        self._rung = False  # the reader is lined up
        self._ready: list[Choice] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._patient = False  # the reader waits for choices that are done

    def post(self, choice: Choice) -> None:
        """Say that a choice has unread output."""
        if not choice.listed:
            choice.listed = True
            self._ready.append(choice)
        if self._waiter is not None and not self._rung and (choice.done or not self._patient):
            self._rung = True
            self._bell.ring(self)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the reader once it has taken what is unread."""
        self._error = error
        self.wake()

    async def get(self, *, patient: bool = False) -> list[Output]:
        """Wait for unread output and take all of it, one piece per choice.

        Args:
            patient: wait for the end of a choice; waking for every token is what an answer that is
                not streamed would mostly pay for.

        Raises:
            SlotlineError: what ``fail`` was given.
        """
        self._patient = patient
        while not (any(choice.done for choice in self._ready) if patient else self._ready):
            if self._error is not None:
                if self._ready:
                    break
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return [choice.take(self._vocabulary) for choice in ready]

    def wake(self) -> None:
        """Let the reader go on, if it waits."""
        self._rung = False
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
