"""EngineClient: what the side that speaks text needs of the side that runs steps.

Messages are columnar, one a step, and plain data: the two sides may live in one process, as
here, or in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slotline.errors import SlotlineError
from slotline.loop import EngineCore
from slotline.outputs import OutputBatch
from slotline.request import SequenceRequest
from slotline.stats import CoreStats


class EngineClient(Protocol):
    """Submit sequences and receive their news."""

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Hand in sequences, all or none.

        Raises:
            OverloadError: the core's caps are reached.
            EngineError: the core cannot run.
        """

    def abort(self, seq_ids: Sequence[int]) -> None:
        """End sequences; returns at once, and their rows and blocks are not used again."""

    async def next_outputs(self) -> OutputBatch:
        """Wait for the news of the next step."""

    async def stats(self) -> CoreStats:
        """Return the core's counters."""


class LocalClient:
    """An EngineClient in the core's own process and event loop."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Hand in sequences, all or none."""
        self.core.submit(requests)

    def abort(self, seq_ids: Sequence[int]) -> None:
        """End sequences; their rows and blocks are free when this returns."""
        self.core.abort(seq_ids)

    async def next_outputs(self) -> OutputBatch:
        """Wait for the news of the next step."""
        return await self.core.next_outputs()

    async def stats(self) -> CoreStats:
        """Return the core's counters."""
        return self.core.stats()

    @property
    def error(self) -> SlotlineError | None:
        """Return why the core cannot run, if it cannot."""
        return self.core.error
