"""An engine for a command that is not async: it runs on a thread, Ctrl-C stays with the main one."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from slotline.apis.cli.console import status, warn
from slotline.config import EngineConfig
from slotline.engine import Engine
from slotline.errors import RequestAborted
from slotline.handle import RequestHandle
from slotline.params import SamplingParams
from slotline.request import Output
from slotline.scoring import Score


class Session:
    """An open engine, called from the main thread."""

    def __init__(self, portal: BlockingPortal, engine: Engine) -> None:
        self.engine = engine
        self._portal = portal

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt of a conversation."""
        return self._portal.call(self.engine.chat_prompt, list(messages))

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Return how likely each text is."""
        return self._portal.call(self.engine.score, list(texts))

    def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[str]:
        """Yield the text of one answer; leaving the loop, by Ctrl-C as well, aborts it."""
        return (output.text for output in self.outputs(prompt, params))

    def outputs(self, prompt: str | list[int], params: SamplingParams) -> Iterator[Output]:
        """Yield the pieces of one answer, as ``stream`` does."""

        async def submit() -> tuple[RequestHandle, asyncio.AbstractEventLoop]:
            return await self.engine.submit([prompt], params), asyncio.get_running_loop()

        handle, loop = self._portal.call(submit)
        warn(handle.warnings)
        pieces = handle.pieces()
        with _on_interrupt(lambda: loop.call_soon_threadsafe(handle.abort)) as interrupts:
            try:
                while (outputs := self._portal.call(_next, pieces)) is not None:
                    yield from outputs
            except RequestAborted:
                if interrupts:
                    raise KeyboardInterrupt from None
                raise
            finally:
                self._portal.call(handle.abort)


async def _next(pieces: AsyncIterator[list[Output]]) -> list[Output] | None:
    return await anext(pieces, None)


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[list[int]]:
    """Call ``act`` on Ctrl-C instead of raising KeyboardInterrupt wherever the main thread happens to be.

    Raised between two steps of the threads' hand-over it can leave a lock taken, and the engine's thread waits for
    ever. Yields the list of signals that came.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # nobody else may set handlers, or gets signals
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        act()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def open_session(config: EngineConfig) -> Iterator[Session]:
    """Open an engine, showing that it loads."""
    with start_blocking_portal("asyncio") as portal:
        opening = portal.wrap_async_context_manager(Engine.open(config=config))
        with status(f"loading {config.model}"):
            engine = opening.__enter__()
        try:
            yield Session(portal, engine)
        finally:
            opening.__exit__(None, None, None)
