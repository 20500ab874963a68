"""Metrics of one engine in Prometheus' text format; the HTTP surface shows them at /metrics.

Every scrape reads one snapshot of the engine's statistics, so the numbers of a scrape agree with
each other and the engine pays nothing in between. No label ever carries text from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slotline.hookspecs import hookimpl

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from slotline.stats import EngineStats

PREFIX = "slotline:"

GAUGES = (
    ("num_requests_running", "running", "Sequences in a slot."),
    ("num_requests_waiting", "waiting", "Sequences in the queue."),
    ("kv_blocks_active", "active_blocks", "KV blocks that running sequences hold."),
    ("kv_blocks_cached", "cached_blocks", "KV blocks kept for reuse by equal prefixes."),
    ("kv_blocks_free", "free_blocks", "KV blocks that hold nothing."),
    ("kv_blocks", "total_blocks", "All KV blocks."),
    ("uptime_seconds", "uptime", "Seconds since the engine was opened."),
)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of accepted requests."),
    ("generation_tokens", "generated_tokens", "Tokens that were sampled."),
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found there."),
    ("num_preemptions", "preemptions", "Sequences that lost their slot and were recomputed."),
    ("engine_steps", "steps", "Steps that were run."),
    ("engine_step_seconds", "step_seconds", "Seconds from the launch of a step to its result, summed."),
    ("engine_host_seconds", "host_seconds", "Seconds to schedule and commit, summed."),
    ("backend_restarts", "restarts", "Times the backend was started again after a failure."),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From a request's arrival to its first token."),
    ("time_per_output_token_seconds", "time_per_output_token", "Mean time between the tokens of a choice."),
    ("e2e_request_latency_seconds", "request_latency", "From a request's arrival to the end of a choice."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "request_completion_tokens", "Tokens of a choice."),
)


@hookimpl
def slotline_register_metrics(register: Callable[[Any], None]) -> None:
    """Register a sink with a registry of its own; called once an engine."""
    register(PrometheusSink())


class PrometheusSink:
    """Renders statistics as text."""

    name = "prometheus"
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry: CollectorRegistry | None = None
        self._snapshot: tuple[EngineStats, str] | None = None

    def render(self, stats: EngineStats, model: str) -> bytes:
        """Return the text for one scrape.

        Args:
            stats: of the engine.
            model: the served name, the only label besides the reason of an end.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        self._snapshot = stats, model
        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(self)
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is depends on no state."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families; prometheus_client calls this."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        if self._snapshot is None:
            return
        stats, model = self._snapshot
        for name, field, text in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([model], getattr(stats, field))
            yield gauge
        for name, field, text in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([model], getattr(stats, field))
            yield counter
        ended = CounterMetricFamily(
            PREFIX + "requests_finished", "Choices that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(stats.requests_finished.items()):
            ended.add_metric([model, reason], count)
        yield ended
        for name, key, text in HISTOGRAMS:
            if (seen := stats.histograms.get(key)) is not None:
                histogram = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
                bounds = [*(str(float(bound)) for bound in seen.bounds), "+Inf"]
                histogram.add_metric([model], list(zip(bounds, seen.cumulative, strict=True)), seen.total)
                yield histogram
