"""Counters, histograms, and one frozen snapshot of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Cumulative counts per upper bound, as Prometheus wants them."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]  # one per bound, then all
    total: float

    @property
    def count(self) -> int:
        """Return the number of observations."""
        return self.cumulative[-1]


class Histogram:
    """Count observations by upper bound."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramSnapshot:
        """Return the counts so far."""
        running, cumulative = 0, []
        for count in self._counts:
            running += count
            cumulative.append(running)
        return HistogramSnapshot(self._bounds, tuple(cumulative), self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """What the core knows: rows, blocks, steps.

    Attributes:
        running, waiting: sequences.
        total_blocks, free_blocks, active_blocks, cached_blocks: of the KV pool.
        steps: committed steps.
        scheduled_tokens, generated_tokens: computed positions; sampled tokens.
        preemptions: rows that gave up their blocks.
        prefix_queries, prefix_hits: tokens looked up in, and taken from, the prefix cache.
        step_seconds: time from launch to result, summed.
        host_seconds: time to schedule and commit, summed.
        restarts: of the backend.
    """

    running: int = 0
    waiting: int = 0
    max_slots: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(CoreStats):
    """What the whole engine knows: the core's numbers and those of finished requests.

    Attributes:
        uptime: seconds since open.
        requests_finished: by reason (stop, length, abort, error).
        prompt_tokens, completion_tokens: of all requests so far.
        histograms: time_to_first_token, request_latency, time_per_output_token (seconds);
            request_prompt_tokens, request_completion_tokens (tokens).
    """

    uptime: float = 0.0
    requests_finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    histograms: dict[str, HistogramSnapshot] = field(default_factory=dict)


class RequestStats:
    """Count requests as they pass the output side."""

    def __init__(self) -> None:
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._histograms = {
            "time_to_first_token": Histogram(SECONDS),
            "time_per_output_token": Histogram(SECONDS),
            "request_latency": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_completion_tokens": Histogram(TOKENS),
        }

    def started(self, prompt_tokens: int) -> None:
        """Count an accepted request."""
        self.prompt_tokens += prompt_tokens
        self._histograms["request_prompt_tokens"].observe(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Count the time to a request's first token."""
        self._histograms["time_to_first_token"].observe(seconds)

    def ended(self, reason: str, tokens: int, seconds: float, since_first: float) -> None:
        """Count a finished choice."""
        self.finished[reason] += 1
        self.completion_tokens += tokens
        self._histograms["request_latency"].observe(seconds)
        self._histograms["request_completion_tokens"].observe(tokens)
        if tokens > 1:
            self._histograms["time_per_output_token"].observe(since_first / (tokens - 1))

    def snapshots(self) -> dict[str, HistogramSnapshot]:
        """Return all histograms."""
        return {name: h.snapshot() for name, h in self._histograms.items()}
