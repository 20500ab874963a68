"""The output processor: columnar news of steps becomes text in mailboxes. It lives on the client's side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slotline.errors import NumericalError, RequestAborted, SlotlineError
from slotline.handle import RequestHandle
from slotline.mailbox import Choice
from slotline.outputs import Finish, OutputBatch
from slotline.plan import LogprobColumns
from slotline.request import FinishReason

Clock = Callable[[], float]


class OutputProcessor:
    """Turn each batch of news into text, find stop strings, and close what ended.

    Args:
        abort: tells the core to end sequences, which it may have to do for stop strings.
        on_first, on_finish: called once a request; for statistics and observers.
        on_gap: called with how long after another token of their sequence tokens came, and how many did.
    """

    def __init__(
        self,
        abort: Callable[[Sequence[int]], None],
        on_first: Callable[[RequestHandle, float], None],
        on_finish: Callable[[RequestHandle, Choice], None],
        on_gap: Callable[[float, int], None] = lambda seconds, tokens: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._abort = abort
        self._on_first = on_first
        self._on_finish = on_finish
        self._on_gap = on_gap
        self._clock = clock
        self._choices: dict[int, Choice] = {}
        self._requests: dict[int, RequestHandle] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def register(self, request: RequestHandle) -> None:
        """Expect news of a request's sequences."""
        for choice in request.choices:
            self._choices[choice.seq_id] = choice
            self._requests[choice.seq_id] = request

    def forget(self, request: RequestHandle) -> list[int]:
        """Stop expecting news of a request; return its sequences that had not ended."""
        live = [c.seq_id for c in request.choices if not c.done]
        for seq_id in live:
            self._drop(seq_id)
        return live

    def process(self, batch: OutputBatch) -> None:
        """Deliver one step's news."""
        for seq_id, cached in batch.admitted:
            if seq_id in self._choices and self._choices[seq_id].index == 0:  # others start from the first one's blocks
                self._requests[seq_id].cached_tokens += cached
        if batch.prompt_logprobs is not None:
            self._deliver_prompts(batch)
        for seq_id, vector in batch.embeddings:
            if seq_id in self._choices:
                self._choices[seq_id].embedding = vector
        self._deliver_tokens(batch)
        for seq_id, error in batch.errors:
            self._fail(seq_id, error)

    def close(self, error: SlotlineError) -> None:
        """End everything that is still expected."""
        for seq_id in list(self._choices):
            self._fail(seq_id, error)

    # --- tokens -----------------------------------------------------------------------

    def _deliver_tokens(self, batch: OutputBatch) -> None:
        """Append each sequence's tokens; the loop is the per-token path of the whole engine."""
        choices, columns, position = self._choices, batch.logprobs, 0
        finish = batch.finish.tolist()
        now, since = self._clock(), dict[float, int]()
        first_column = batch.tokens[:, 0].tolist() if batch.tokens.shape[1] else []
        for k, (seq_id, token, n) in enumerate(
            zip(batch.seq_ids.tolist(), first_column, batch.n_tokens.tolist(), strict=True)
        ):
            at, position = position, position + n
            choice = choices.get(seq_id)
            if choice is None:  # ended by a stop string or aborted while this step was in flight
                continue
            end = finish[k]
            if n:
                if choice.total:
                    since[choice.last_time] = since.get(choice.last_time, 0) + 1
                choice.last_time = now
                self._take_token(choice, token, end, columns, at)
            if end and not choice.done:
                self._end(choice, end, token)
            choice.box.post(choice)
        for before, tokens in since.items():  # most steps have one entry: all rows had a token in the step before
            self._on_gap(now - before, tokens)

    def _take_token(self, choice: Choice, token: int, end: int, columns: LogprobColumns | None, at: int) -> None:
        choice.ids.append(token)
        choice.total += 1
        if choice.total == 1:
            choice.first_time = self._clock()
            self._on_first(self._requests[choice.seq_id], choice.first_time)
        if columns is not None and choice.wants_logprobs:
            choice.columns.append((columns, at, at + 1))
        stream = choice.stream
        if end == Finish.STOP and not self._requests[choice.seq_id].params.include_stop_str_in_output:
            return  # the text of an end token or stop id is not shown
        text = stream.push(token)
        if text:
            choice.texts.append(text)
        if stream.matched is not None:
            self._close(choice, "stop", stream.matched)
            if not end:
                self._abort([choice.seq_id])

    def _end(self, choice: Choice, finish: int, token: int) -> None:
        """Close a choice that the core has ended."""
        if finish == Finish.NAN:
            self._fail(choice.seq_id, NumericalError("the model gave no finite logits for this request"))
            return
        choice.texts.append(choice.stream.finish())
        if choice.stream.matched is not None:
            self._close(choice, "stop", choice.stream.matched)
        elif finish == Finish.STOP:
            named = self._requests[choice.seq_id].params.stop_token_ids or ()
            self._close(choice, "stop", token if token in named else None)
        else:
            self._close(choice, "length", None)

    def _close(self, choice: Choice, reason: FinishReason, stop_reason: str | int | None) -> None:
        choice.finish_reason, choice.stop_reason, choice.done = reason, stop_reason, True
        request = self._requests[choice.seq_id]
        self._drop(choice.seq_id)
        self._on_finish(request, choice)

    def _fail(self, seq_id: int, error: SlotlineError) -> None:
        """End the whole request of a sequence with an error; its other choices are aborted."""
        request = self._requests.get(seq_id)
        if request is None:
            return
        request.error = error
        others = [i for i in self.forget(request) if i != seq_id]
        if others:
            self._abort(others)
        reason: FinishReason = "abort" if isinstance(error, RequestAborted) else "error"
        for choice in request.choices:
            if not choice.done:
                choice.done, choice.finish_reason = True, reason
                self._on_finish(request, choice)
        request.box.fail(error)

    def _drop(self, seq_id: int) -> None:
        self._choices.pop(seq_id, None)
        self._requests.pop(seq_id, None)

    # --- prompt positions -------------------------------------------------------------

    def _deliver_prompts(self, batch: OutputBatch) -> None:
        assert batch.prompt_counts is not None and batch.prompt_logprobs is not None
        position = 0
        for seq_id, n in zip(batch.seq_ids.tolist(), batch.prompt_counts.tolist(), strict=True):
            choice = self._choices.get(seq_id)
            if choice is not None and n and choice.wants_prompt_logprobs:
                choice.prompt_columns.append(batch.prompt_logprobs.slice(position, position + n))
            position += n
