"""Engine: open a model on a backend, and ask it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import anyio.to_thread

from slotline.backend import BackendInfo, Capabilities
from slotline.client import EngineClient, Health, LocalClient
from slotline.config import EngineConfig
from slotline.embedding import EMBED_ONLY, embedding_of
from slotline.errors import (
    ConfigError,
    EngineClosed,
    EngineUnhealthy,
    InvalidParameter,
    RequestAborted,
    UnsupportedParameter,
)
from slotline.handle import RequestHandle
from slotline.intake import Intake
from slotline.loading import load, open_model
from slotline.loop import EngineCore
from slotline.mailbox import Choice
from slotline.manager import PluginManager
from slotline.model import Message, Model
from slotline.output import OutputProcessor
from slotline.params import SamplingParams
from slotline.plan import FloatArray
from slotline.prompts import Prompt, PromptEncoder, check_prompts
from slotline.request import Completion, Output, RequestEvent, SequenceRequest
from slotline.scoring import SCORE_ONLY, Score, score_of
from slotline.stats import EngineStats, RequestStats, engine_stats
from slotline.text import Vocabulary
from slotline.turns import TURN, Bell, Door

__all__ = ["Engine", "Health"]

log = logging.getLogger("slotline")


class Engine:
    """A model on a backend, ready to answer many requests at once.

    Open it with ``async with Engine.open(...) as engine`` and leave it in the same task.

    Attributes:
        config, model, capabilities, info, manager, vocabulary: what it was opened with.
        max_model_len: longest sequence that can run, prompt and answer.
    """

    def __init__(self, config: EngineConfig, model: Model, manager: PluginManager, client: EngineClient) -> None:
        self.config = config
        self.model = model
        self.manager = manager
        self.capabilities: Capabilities = client.capabilities
        self.info: BackendInfo = client.info
        self.max_model_len = client.longest
        self.vocabulary = Vocabulary(self.model.tokenizer)
        self._client = client
        self._intake = Intake(
            self.config,
            self.model,
            self.capabilities,
            self.max_model_len,
            self.info.vocab_size,
            self.manager.registry("logits_processors"),
        )
        self._stats = RequestStats()
        self._processor = OutputProcessor(self._client.abort, self._first_token, self._finish, self._stats.gap)
        self._bell = Bell()
        self._door = Door(self._client.make_way)
        self._handles: dict[str, RequestHandle] = {}
        self._observed = bool(self.manager.hook.slotline_observe_request.get_hookimpls())
        self._prompts = PromptEncoder(self.model)
        self._next_seq = 0
        self._next_request = 0
        self._opened = time.monotonic()
        self._closed = False

    # --- open and close ---------------------------------------------------------------

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: str | None = None,
        /,
        *,
        config: EngineConfig | None = None,
        manager: PluginManager | None = None,
        **options: Any,
    ) -> AsyncIterator[Engine]:
        """Open a model and yield an engine; EngineConfig fields are keywords.

        Args:
            model: as EngineConfig.model.
            config: instead of model and options.
            manager: plugins to use instead of those that config.plugins says; a host can
                register objects of its own there.
            options: EngineConfig fields.

        Raises:
            ConfigError, PluginError, ModelError: with one sentence that says what to do.
        """
        if config is None:
            config = EngineConfig.of(model, **options)
        elif model is not None or options:
            raise ConfigError("give either config or model and options, not both")
        thread = ThreadPoolExecutor(1, thread_name_prefix="slotline-backend")
        try:
            loaded, reload = await load(config, manager, thread)
            core = EngineCore(loaded.config, loaded.backend, loaded.info, thread, reload)
            engine = cls(loaded.config, loaded.model, loaded.manager, LocalClient(core))
            async with _running((engine._client.run, engine._pump, engine._door.run), engine._close):
                yield engine
        finally:
            thread.shutdown(wait=False)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, path: str, config: EngineConfig, *, manager: PluginManager | None = None
    ) -> AsyncIterator[Engine]:
        """Wait for an engine process on a local socket and yield an engine that runs its steps there.

        Text stays in this process: templates, tokens to text, stop strings. An engine process that
        ends takes its requests with it (EngineLost); the next one on the path is used from then on.

        Args:
            path: of the socket.
            config: that of the engine process.
            manager: as for ``open``.
        """
        from slotline.remote import RemoteClient

        client = RemoteClient(path)
        async with _running((client.run,), client.close):
            await client.greeted()
            config = config.with_options(backend=client.backend)
            plugins = manager or PluginManager(config.plugins)
            entry = plugins.registry("backends")[config.backend]
            model = await anyio.to_thread.run_sync(open_model, config, plugins, entry)
            engine = cls(config, model, plugins, client)
            client.counts = engine._stats.counts
            async with _running((engine._pump, engine._door.run), engine._close):
                yield engine

    async def _pump(self) -> None:
        """Bring the core's news to the mailboxes."""
        try:
            while True:
                batch = await self._client.next_outputs()
                if len(batch.seq_ids) > TURN:
                    await self._client.make_way()
                self._processor.process(batch)
                await self._wake_readers()
        except Exception as error:
            log.exception("output processing failed")
            self._client.give_up(EngineUnhealthy(f"output processing failed: {error!r}"))
            self._processor.close(EngineUnhealthy(f"output processing failed: {error!r}"))
        finally:
            self._bell.wake(len(self._bell))

    async def _wake_readers(self) -> None:
        """Wake readers by turns, the engine going first between two of them; news end it after a turn at least."""
        while True:
            self._bell.wake(TURN)
            if not self._bell:
                return
            await asyncio.sleep(0)  # those just woken read
            if self._client.has_news:
                return
            await self._client.make_way()

    async def _close(self) -> None:
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._client.close()
        self._processor.close(EngineClosed("the engine was closed"))

    # --- ask --------------------------------------------------------------------------

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        embed: bool = False,
        chat_options: Mapping[str, Any] | None = None,
    ) -> RequestHandle:
        """Check, encode and queue prompts; all of them and all their choices come in, or none.

        Args:
            prompts: each a text, a list of token ids, or a list of chat messages.
            params: for all of them.
            request_id: unique while it lives; made up if not given.
            priority: lower runs first.
            client: whose share of the queue this takes.
            deadline: seconds within which it must finish.
            cache_salt: requests with another salt do not share cached prefixes with it.
            adapter: name of an adapter, for backends that have them.
            embed: give the prompts' embeddings; use it with ``EMBED_ONLY``.
            chat_options: for chat messages, such as add_generation_prompt.

        Raises:
            RequestError: naming the field at fault.
            OverloadError: the queue is full.
            EngineError: the engine cannot run.
        """
        await self._door.enter()
        self._check_open()
        params = SamplingParams() if params is None else params
        self._intake.check_place(priority, cache_salt, deadline, client)
        self._intake.check_kind(adapter, embed=embed)
        request_id = self._new_id(request_id)
        resolved = self._intake.resolve(params)
        check_prompts(prompts)
        self._intake.check_count(len(prompts), resolved.params.n)
        token_ids, cut = self._intake.truncated(
            await self._prompts.encode_all(prompts, chat_options or {}), resolved.params
        )
        common = {
            "priority": priority,
            "client": client,
            "deadline": deadline,
            "cache_salt": cache_salt,
            "embed": embed,
        }
        sequences = self._intake.sequences(self._next_seq, token_ids, resolved, **common)
        self._next_seq += len(sequences)
        notices = resolved.notices + cut
        handle = RequestHandle(request_id, resolved.params, token_ids, self.vocabulary, notices, self._bell, client)
        handle.attach(sequences, self._abort_handle)
        await self._enter(handle, sequences)
        return handle

    async def _enter(self, handle: RequestHandle, sequences: Sequence[SequenceRequest]) -> None:
        """Let the core have a request; one that it refuses leaves no trace."""
        self._processor.register(handle)
        self._handles[handle.request_id] = handle
        try:
            await self._client.submit(sequences)
        except BaseException:
            self._processor.forget(handle)
            del self._handles[handle.request_id]
            raise
        self._stats.started(handle.usage.prompt_tokens)
        self._observe("admitted", handle)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Output]:
        """Yield pieces of the answer as they come; options as for ``submit``."""
        handle = await self.submit([prompt], params, **options)
        box, left = handle.box, len(handle.choices)
        try:  # what `pieces` does, without a generator inside a generator for each token
            while left:
                for output in await box.get():
                    left -= output.finish_reason is not None
                    yield output
            if handle.error is not None:
                raise handle.error
        finally:
            if not handle.finished:
                handle.abort()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Return the whole answer; options as for ``submit``."""
        handle = await self.submit([prompt], params, **options)
        return (await handle.completions())[0]

    async def score(self, prompts: Sequence[Prompt], **options: Any) -> list[Score]:
        """Return how likely each text is, without generating anything.

        Raises:
            UnsupportedParameter: the backend has no prompt_logprobs.
        """
        if not self.capabilities.prompt_logprobs:
            raise UnsupportedParameter(
                "this backend has no prompt_logprobs, so it cannot score", param="prompt_logprobs"
            )
        handle = await self.submit(prompts, SCORE_ONLY, **options)
        return [score_of(completion) for completion in await handle.completions()]

    async def embed(self, prompts: Sequence[Prompt], **options: Any) -> list[FloatArray]:
        """Return the embedding of each prompt, [C] of length 1: the last layer's output at its last token.

        Raises:
            UnsupportedParameter: the backend gives no hidden states.
        """
        handle = await self.submit(prompts, EMBED_ONLY, embed=True, **options)
        return [embedding_of(completion) for completion in await handle.completions()]

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not running."""
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        handle.abort()
        return True

    # --- text -------------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self.model.tokenizer.encode(text, parse_special=parse_special, add_special=add_special)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.vocabulary.decode(token_ids, skip_special_tokens)

    async def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Return the token ids of a text; long ones are encoded off the event loop."""
        return await self._prompts.encode_text(text, parse_special=parse_special, add_special=add_special)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; long ones are decoded off the event loop.

        Raises:
            InvalidParameter: an id is outside the vocabulary.
        """
        self._intake.check_ids("tokens", token_ids)
        return await self._prompts.decode(self.vocabulary, token_ids, skip_special_tokens)

    async def chat_prompt(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of chat messages under the model's template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        return await self._prompts.encode_chat(messages, options)

    # --- look -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters."""
        return engine_stats(self._client.latest, self._stats.counts(), time.monotonic() - self._opened)

    async def total_stats(self) -> EngineStats:
        """Return a snapshot of all counters, with those of other processes that use the same engine process."""
        core, counts = await self._client.stats(self._stats.counts())
        return engine_stats(core, counts, time.monotonic() - self._opened)

    def health(self) -> Health:
        """Tell whether the engine can answer."""
        if self._closed:
            return Health("closed", "the engine was closed")
        return self._client.health()

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, blocks and queue do not agree; for tests."""
        self._client.check_integrity()

    # --- inside -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed; open a new one")
        if self._client.error is not None:
            raise self._client.error

    def _new_id(self, request_id: str | None) -> str:
        if request_id is None:
            self._next_request += 1
            return f"req-{self._next_request}"
        if not isinstance(request_id, str) or request_id in self._handles:
            raise InvalidParameter.of("request_id", request_id, "a string that no running request is called by")
        return request_id

    def _abort_handle(self, handle: RequestHandle) -> None:
        live = self._processor.forget(handle)
        if not live:
            return
        self._client.abort(live)
        for choice in handle.choices:
            if not choice.done:
                choice.done, choice.finish_reason = True, "abort"
                self._finish(handle, choice)
        handle.error = RequestAborted(f"request {handle.request_id} was aborted")
        handle.box.fail(handle.error)

    def _first_token(self, handle: RequestHandle, now: float) -> None:
        self._stats.first_token(now - handle.started)
        self._observe("first_token", handle)

    def _finish(self, handle: RequestHandle, choice: Choice) -> None:
        now = time.monotonic()
        reason = choice.finish_reason or "error"
        self._stats.ended(reason, choice.total, now - handle.started, now - (choice.first_time or now))
        if handle.finished:
            self._handles.pop(handle.request_id, None)
            self._observe("finished", handle)

    def _observe(self, kind: Literal["admitted", "first_token", "finished"], handle: RequestHandle) -> None:
        if not self._observed:
            return
        usage = handle.usage
        event = RequestEvent(
            kind=kind,
            request_id=handle.request_id,
            client=handle.client,
            time=time.monotonic(),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=handle.choices[0].finish_reason,
            error=handle.error,
            extra=handle.notes,
        )
        self.manager.hook.slotline_observe_request(event=event)


@asynccontextmanager
async def _running(
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]], close: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Run tasks around a host's block, then close; what the block raises leaves as it is, in no group."""
    raised: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(task)
            try:
                yield
            except BaseException as error:
                raised = error
                raise
            finally:
                group.cancel_scope.cancel()
                await close()
    except BaseExceptionGroup:
        if raised is None:
            raise
    if raised is not None:
        raise raised
