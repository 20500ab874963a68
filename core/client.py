"""EngineClient: what the side that speaks text needs of the side that runs steps.

Messages are columnar, one a step, and plain data: the two sides live in one process, as here, or
in two, as in slotline.remote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from slotline.backend import BackendInfo, Capabilities
from slotline.errors import SlotlineError
from slotline.loop import EngineCore
from slotline.outputs import OutputBatch
from slotline.request import SequenceRequest
from slotline.stats import CoreStats, RequestCounts


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine can answer, and if not, why."""

    status: Literal["ok", "loading", "unhealthy", "wedged", "closed"]
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Tell whether requests can be answered."""
        return self.status == "ok"


class EngineClient(Protocol):
    """Submit sequences and receive their news.

    Attributes:
        capabilities, info: of the backend.
        longest: tokens of the longest sequence that can run.
        error: why the core can run no more, if it cannot.
        latest: the core's counters, as far as they are known without asking.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def info(self) -> BackendInfo: ...

    @property
    def longest(self) -> int: ...

    @property
    def error(self) -> SlotlineError | None: ...

    @property
    def latest(self) -> CoreStats: ...

    async def run(self) -> None:
        """Do what the client has to do beside its callers, until cancelled."""

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

    @property
    def has_news(self) -> bool:
        """Tell whether ``next_outputs`` would return at once."""

    async def make_way(self) -> None:
        """Let a core in this process go first: wait, not for long, while it has a step to launch or to take in."""

    async def stats(self, counts: RequestCounts) -> tuple[CoreStats, RequestCounts]:
        """Return the core's counters, and what all of its clients counted; ``counts`` is this one's share."""

    def health(self) -> Health:
        """Tell whether the core can run steps."""

    def give_up(self, error: SlotlineError) -> None:
        """Refuse everything from now on and end what is left."""

    async def close(self) -> None:
        """Let go of the core; one that is this client's own ends."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the core's tables do not agree, where they can be seen."""


class LocalClient:
    """An EngineClient in the core's own process and event loop."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.info = core.info
        self.longest = core.scheduler.longest

    @property
    def capabilities(self) -> Capabilities:
        """Return what the backend can do."""
        return self.core.backend.capabilities

    @property
    def error(self) -> SlotlineError | None:
        """Return why the core cannot run, if it cannot."""
        return self.core.error

    @property
    def latest(self) -> CoreStats:
        """Return the core's counters."""
        return self.core.stats()

    async def run(self) -> None:
        """Run the core."""
        await self.core.run()

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Hand in sequences, all or none."""
        self.core.submit(requests)

    def abort(self, seq_ids: Sequence[int]) -> None:
        """End sequences; their rows and blocks are free when this returns."""
        self.core.abort(seq_ids)

    async def next_outputs(self) -> OutputBatch:
        """Wait for the news of the next step."""
        return await self.core.next_outputs()

    @property
    def has_news(self) -> bool:
        """Tell whether ``next_outputs`` would return at once."""
        return self.core.has_news

    async def make_way(self) -> None:
        """Wait while the core has a step to launch or to take in."""
        await self.core.settled()

    async def stats(self, counts: RequestCounts) -> tuple[CoreStats, RequestCounts]:
        """Return the core's counters and the only client's."""
        return self.core.stats(), counts

    def health(self) -> Health:
        """Tell whether the core can run steps."""
        return health_of(self.core)

    def give_up(self, error: SlotlineError) -> None:
        """Refuse everything from now on and end what is left."""
        self.core.give_up(error)

    async def close(self) -> None:
        """Close the core."""
        await self.core.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, blocks and queue do not agree."""
        self.core.scheduler.check_integrity()


def health_of(core: EngineCore) -> Health:
    """Judge a core by whether it failed, and by its progress."""
    if core.error is not None:
        return Health("unhealthy", core.error.message)
    if core.wedged:
        return Health("wedged", "a step has given no result for a long time")
    return Health("ok")
