"""One sequence inside the core: a request's choice, waiting or running."""

from __future__ import annotations

from slotline.blocks import ROOT
from slotline.plan import IntArray
from slotline.request import SequenceRequest

NOWHERE = -1


class Sequence:
    """A sequence's state that outlives its row: what is known, and how far it was published."""

    __slots__ = (
        "cached_tokens",
        "node",
        "preemptions",
        "prompt_delivered",
        "published",
        "publishing",
        "request",
        "row",
        "tokens",
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.row = NOWHERE
        self.tokens: IntArray = request.token_ids  # known tokens while it waits; in the row table while it runs
        self.cached_tokens: int | None = None  # of its first admission
        self.preemptions = 0
        self.prompt_delivered = 1  # prompt positions whose logprobs are out; position 0 has none
        self.published = 0  # blocks whose content is known to the pool
        self.node = ROOT
        self.publishing = True

    @property
    def seq_id(self) -> int:
        """Return the sequence's number."""
        return self.request.seq_id

    @property
    def order(self) -> tuple[int, int]:
        """Return what decides who goes first: priority, then arrival."""
        return self.request.priority, self.request.seq_id

    @property
    def reads_cache(self) -> bool:
        """Tell whether a cached prefix may replace computing: not when prompt positions are scored."""
        return self.request.prompt_logprobs is None
