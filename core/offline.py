"""pipeline: the engine for code that is not async, on a thread and event loop of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from slotline.config import EngineConfig
from slotline.engine import Engine
from slotline.manager import PluginManager
from slotline.params import SamplingParams
from slotline.plan import FloatArray
from slotline.prompts import Prompt
from slotline.request import Completion, Notice, Output
from slotline.scoring import Score


class SlotlineWarning(UserWarning):
    """Something was asked for that the backend does not honour."""


def pipeline(model: str | None = None, /, *, manager: PluginManager | None = None, **options: Any) -> Pipeline:
    """Open a model for synchronous use; close it with ``with`` or ``close()``.

    ::

        with slotline.pipeline("smollm2-135m") as pipe:
            print(pipe("The capital of France is").text)

    Args:
        model: as for ``Engine.open``.
        manager: plugins to use, as for ``Engine.open``.
        options: EngineConfig fields.
    """
    return Pipeline(EngineConfig.of(model, **options), manager)


class Pipeline:
    """A synchronous face of one engine. Calls from several threads run in one batch."""

    def __init__(self, config: EngineConfig, manager: PluginManager | None = None) -> None:
        self._stack = ExitStack()
        self._warned: set[str] = set()
        try:
            self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
            self.engine: Engine = self._stack.enter_context(
                self._portal.wrap_async_context_manager(Engine.open(config=config, manager=manager))
            )
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and its thread; idempotent."""
        self._stack.close()

    @overload
    def __call__(self, prompts: str | Prompt, params: SamplingParams | None = None, **options: Any) -> Completion: ...
    @overload
    def __call__(
        self,
        prompts: list[str],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Completion]: ...
    def __call__(
        self,
        prompts: Prompt | list[Any],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them in one batch.

        Args:
            prompts: a text, token ids, chat messages; or a list of any of these.
            params: for all.
            options: as for ``Engine.submit``.
        """
        many = _is_list_of_prompts(prompts)
        asked = list(prompts) if many else [prompts]
        done: list[Completion] = self._portal.call(self._complete, asked, params, options)
        self._warn(done[0].warnings)
        return done if many else done[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Iterator[Output]:
        """Yield pieces of one answer; closing the iterator aborts the request."""
        handle = self._portal.call(self._submit, [prompt], params, options)
        self._warn(handle.warnings)
        pieces = handle.pieces()
        try:
            while True:
                outputs = self._portal.call(_next, pieces)
                if outputs is None:
                    return
                yield from outputs
        finally:
            self._portal.call(pieces.aclose)
            if not handle.finished:
                self._portal.call(handle.abort)

    def score(self, prompts: Prompt | list[Any]) -> Score | list[Score]:
        """Return how likely texts are, without generating anything."""
        many = _is_list_of_prompts(prompts)
        scores: list[Score] = self._portal.call(self.engine.score, list(prompts) if many else [prompts])
        return scores if many else scores[0]

    def embed(self, prompts: Prompt | list[Any]) -> FloatArray | list[FloatArray]:
        """Return the embedding of one prompt, or of each of several."""
        many = _is_list_of_prompts(prompts)
        vectors: list[FloatArray] = self._portal.call(self.engine.embed, list(prompts) if many else [prompts])
        return vectors if many else vectors[0]

    async def _submit(self, prompts: list[Any], params: SamplingParams | None, options: dict[str, Any]) -> Any:
        return await self.engine.submit(prompts, params, **options)

    async def _complete(
        self, prompts: list[Any], params: SamplingParams | None, options: dict[str, Any]
    ) -> list[Completion]:
        handle = await self.engine.submit(prompts, params, **options)
        return await handle.completions()

    def _warn(self, notices: Sequence[Notice]) -> None:
        """Warn once for each kind."""
        for notice in notices:
            if notice.code not in self._warned:
                self._warned.add(notice.code)
                warnings.warn(notice.message, SlotlineWarning, stacklevel=3)


async def _next(pieces: Any) -> list[Output] | None:
    outputs: list[Output] | None = await anext(pieces, None)
    return outputs


def _is_list_of_prompts(prompts: Any) -> bool:
    """Tell a list of prompts, some may be arrays, from one prompt that is a list: of ids, or of messages."""
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and (isinstance(prompts[0], str | list | tuple) or getattr(prompts[0], "ndim", 0) == 1)
    )
