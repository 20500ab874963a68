"""Counters, histograms, and one frozen snapshot of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

BRIEF = (0.00001, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
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

    def plus(self, other: HistogramSnapshot) -> HistogramSnapshot:
        """Return the sum with another of the same bounds."""
        pairs = zip(self.cumulative, other.cumulative, strict=True)
        return HistogramSnapshot(self.bounds, tuple(a + b for a, b in pairs), self.total + other.total)


def add_histograms(
    one: Mapping[str, HistogramSnapshot], other: Mapping[str, HistogramSnapshot]
) -> dict[str, HistogramSnapshot]:
    """Return the sums of what two sides counted; both have the same bounds under a name."""
    total = {**one}
    for name, seen in other.items():
        mine = total.get(name)
        total[name] = seen if mine is None else mine.plus(seen)
    return total


class Histogram:
    """Count observations by upper bound."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, or the same one several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

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
        padded_tokens: positions that a backend computed for nothing, where it counts them.
        queued_tokens: of the prompts that wait.
        preemptions: rows that gave up their blocks.
        prefix_queries, prefix_hits: tokens looked up in, and taken from, the prefix cache.
        step_seconds: time from launch to result, summed.
        device_seconds: time of steps on the device, summed, where the backend tells.
        host_seconds: time to schedule and commit, summed.
        restarts: of the backend.
        histograms: queue_time (from arrival to a row), step_time (from launch to result), step_gap (the
            backend had work coming but no step in flight); step_tokens, step_rows.
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
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    restarts: int = 0
    padded_tokens: int = 0
    queued_tokens: int = 0
    histograms: dict[str, HistogramSnapshot] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Return all fields by name, as they are."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class StepMeter:
    """Time steps, and how long sequences wait for a row.

    Attributes:
        step_seconds, device_seconds: summed.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.device_seconds = 0.0
        self._arrived: dict[int, float] = {}
        self._idle_since: float | None = None
        self._histograms = {
            "queue_time": Histogram(SECONDS),
            "step_time": Histogram(BRIEF),
            "step_gap": Histogram(BRIEF),
            "step_tokens": Histogram(TOKENS),
            "step_rows": Histogram(TOKENS),
        }

    def arrived(self, seq_ids: Iterable[int], now: float) -> None:
        """Begin to count how long sequences wait."""
        self._arrived.update(dict.fromkeys(seq_ids, now))

    def left(self, seq_id: int) -> None:
        """Forget a sequence that ended, wherever it was."""
        self._arrived.pop(seq_id, None)

    def launched(self, admitted: Iterable[int], rows: int, tokens: int, now: float) -> None:
        """Count a step that begins, and the sequences that got a row with it."""
        for seq_id in admitted:
            if (since := self._arrived.pop(seq_id, None)) is not None:  # once, not after a preemption again
                self._histograms["queue_time"].observe(now - since)
        if self._idle_since is not None:
            self._histograms["step_gap"].observe(now - self._idle_since)
            self._idle_since = None
        self._histograms["step_tokens"].observe(tokens)
        self._histograms["step_rows"].observe(rows)

    def took_in(self, since: float, now: float, device_ms: float, *, more: bool) -> None:
        """Count a step that is over; ``more`` tells whether another is in flight."""
        self.step_seconds += now - since
        self.device_seconds += device_ms / 1e3
        self._histograms["step_time"].observe(now - since)
        self._idle_since = None if more else now

    def rest(self) -> None:
        """Note that there is no work: what follows is no gap."""
        self._idle_since = None

    def snapshots(self) -> dict[str, HistogramSnapshot]:
        """Return all histograms."""
        return {name: h.snapshot() for name, h in self._histograms.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(CoreStats):
    """What the whole engine knows: the core's numbers and those of finished requests.

    Attributes:
        uptime: seconds since open.
        requests_finished: by reason (stop, length, abort, error).
        requests_started: accepted so far.
        prompt_tokens, completion_tokens: of all requests so far.
        histograms: those of the core, and time_to_first_token, inter_token, request_latency, decode_time,
            time_per_output_token (seconds); request_prompt_tokens, request_completion_tokens (tokens).
    """

    uptime: float = 0.0
    requests_finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests_started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """What one client side has counted; the counts of several add up."""

    finished: dict[str, int] = field(default_factory=dict)
    started: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    histograms: dict[str, HistogramSnapshot] = field(default_factory=dict)

    def __add__(self, other: RequestCounts) -> RequestCounts:
        reasons = self.finished.keys() | other.finished.keys()
        return RequestCounts(
            finished={r: self.finished.get(r, 0) + other.finished.get(r, 0) for r in sorted(reasons)},
            started=self.started + other.started,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            histograms=add_histograms(self.histograms, other.histograms),
        )


def engine_stats(core: CoreStats, counts: RequestCounts, uptime: float) -> EngineStats:
    """Join what the core knows and what its clients counted."""
    values = core.values() | {"histograms": core.histograms | counts.histograms}
    return EngineStats(
        **values,
        uptime=uptime,
        requests_started=counts.started,
        requests_finished=dict(counts.finished),
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
    )


class RequestStats:
    """Count requests as they pass the output side."""

    def __init__(self) -> None:
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.requests = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._histograms = {
            "time_to_first_token": Histogram(SECONDS),
            "inter_token": Histogram(SECONDS),
            "time_per_output_token": Histogram(SECONDS),
            "decode_time": Histogram(SECONDS),
            "request_latency": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_completion_tokens": Histogram(TOKENS),
        }

    def started(self, prompt_tokens: int) -> None:
        """Count an accepted request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self._histograms["request_prompt_tokens"].observe(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Count the time to a request's first token."""
        self._histograms["time_to_first_token"].observe(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        """Count the time between two tokens of a sequence, for each of several sequences."""
        self._histograms["inter_token"].observe(seconds, tokens)

    def ended(self, reason: str, tokens: int, seconds: float, since_first: float) -> None:
        """Count a finished choice."""
        self.finished[reason] += 1
        self.completion_tokens += tokens
        self._histograms["request_latency"].observe(seconds)
        self._histograms["request_completion_tokens"].observe(tokens)
        if tokens:
            self._histograms["decode_time"].observe(since_first)
        if tokens > 1:
            self._histograms["time_per_output_token"].observe(since_first / (tokens - 1))

    def counts(self) -> RequestCounts:
        """Return everything counted so far."""
        return RequestCounts(
            finished=dict(self.finished),
            started=self.requests,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            histograms={name: h.snapshot() for name, h in self._histograms.items()},
        )
