"""Metrics of one engine in Prometheus' text format; the HTTP surface shows them at /metrics.

Every scrape reads one snapshot of the engine's statistics, so the numbers of a scrape agree with
each other and the engine pays nothing in between. No label ever carries text from a request.

What vLLM's dashboards and autoscalers look for is there under vLLM's own names and labels, beside
slotline's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slotline.hookspecs import hookimpl

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from slotline.stats import EngineStats

OURS = "slotline:"
THEIRS = "vllm:"
ENGINE = "0"  # vLLM's label for one of several engines behind a server; here there is one

# (slotline's name, vLLM's name or "", field, help)
GAUGES = (
    ("num_requests_running", "num_requests_running", "running", "Sequences in a slot."),
    ("num_requests_waiting", "num_requests_waiting", "waiting", "Sequences in the queue."),
    ("queued_tokens", "", "queued_tokens", "Tokens of the prompts in the queue."),
    ("slots", "", "max_slots", "Sequences that can run at once."),
    ("kv_blocks_active", "", "active_blocks", "KV blocks that running sequences hold."),
    ("kv_blocks_cached", "", "cached_blocks", "KV blocks kept for reuse by equal prefixes."),
    ("kv_blocks_free", "", "free_blocks", "KV blocks that hold nothing."),
    ("kv_blocks", "", "total_blocks", "All KV blocks."),
    ("uptime_seconds", "", "uptime", "Seconds since the engine was opened."),
)
COUNTERS = (
    ("requests_started", "", "requests_started", "Requests that were accepted."),
    ("prompt_tokens", "prompt_tokens", "prompt_tokens", "Prompt tokens of accepted requests."),
    ("generation_tokens", "generation_tokens", "generated_tokens", "Tokens that were sampled."),
    ("scheduled_tokens", "", "scheduled_tokens", "Positions that were computed."),
    ("padded_tokens", "", "padded_tokens", "Positions computed for nothing, where the backend counts them."),
    ("prefix_cache_queries", "prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "prefix_hits", "Prompt tokens found there."),
    ("num_preemptions", "num_preemptions", "preemptions", "Sequences that lost their slot and were recomputed."),
    ("engine_steps", "", "steps", "Steps that were run."),
    ("engine_step_seconds", "", "step_seconds", "Seconds from the launch of a step to its result, summed."),
    ("engine_device_seconds", "", "device_seconds", "Seconds of steps on the device, where the backend tells."),
    ("engine_host_seconds", "", "host_seconds", "Seconds to schedule and commit, summed."),
    ("backend_restarts", "", "restarts", "Times the backend was started again after a failure."),
)
HISTOGRAMS = (
    (
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
        "time_to_first_token",
        "From a request's arrival to its first token.",
    ),
    (
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "inter_token",
        "From a token to the next of its sequence.",
    ),
    (
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "time_per_output_token",
        "Mean time between the tokens of a choice.",
    ),
    (
        "e2e_request_latency_seconds",
        "e2e_request_latency_seconds",
        "request_latency",
        "From a request's arrival to the end of a choice.",
    ),
    (
        "request_queue_time_seconds",
        "request_queue_time_seconds",
        "queue_time",
        "From a sequence's arrival to its slot.",
    ),
    (
        "request_decode_time_seconds",
        "request_decode_time_seconds",
        "decode_time",
        "From the first token of a choice to its end.",
    ),
    ("request_prompt_tokens", "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("request_generation_tokens", "request_generation_tokens", "request_completion_tokens", "Tokens of a choice."),
    ("step_tokens", "iteration_tokens_total", "step_tokens", "Positions that one step computes."),
    ("step_rows", "", "step_rows", "Sequences in one step."),
    ("step_seconds", "", "step_time", "From the launch of a step to its result."),
    ("step_gap_seconds", "", "step_gap", "Work was there and no step in flight, for so long."),
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
            model: the served name, the only label besides the reason of an end and vLLM's ``engine``.
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
        if self._snapshot is None:
            return
        stats, model = self._snapshot
        yield from _families(OURS, 0, stats, {"model_name": model}, "requests_finished")
        yield from _families(THEIRS, 1, stats, {"model_name": model, "engine": ENGINE}, "request_success")
        yield from _of_cache(stats, {"model_name": model, "engine": ENGINE})


def _families(
    prefix: str, column: int, stats: EngineStats, labels: dict[str, str], ended_name: str
) -> Iterable[Metric]:
    """Yield what has a name under this prefix."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names, values = list(labels), list(labels.values())
    for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for row in table:
            if row[column]:
                family = kind(prefix + row[column], row[3], labels=names)
                family.add_metric(values, getattr(stats, row[2]))
                yield family
    ended = CounterMetricFamily(
        prefix + ended_name, "Choices that ended, by reason.", labels=[*names, "finished_reason"]
    )
    for reason, count in sorted(stats.requests_finished.items()):
        ended.add_metric([*values, reason], count)
    yield ended
    for row in HISTOGRAMS:
        if row[column] and (seen := stats.histograms.get(row[2])) is not None:
            histogram = HistogramMetricFamily(prefix + row[column], row[3], labels=names)
            bounds = [*(str(float(bound)) for bound in seen.bounds), "+Inf"]
            histogram.add_metric(values, list(zip(bounds, seen.cumulative, strict=True)), seen.total)
            yield histogram


def _of_cache(stats: EngineStats, labels: dict[str, str]) -> Iterable[Metric]:
    """Yield how full the KV cache is, as a share; blocks that only wait for reuse count as empty."""
    from prometheus_client.core import GaugeMetricFamily

    used = GaugeMetricFamily(
        THEIRS + "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", labels=list(labels)
    )
    used.add_metric(list(labels.values()), stats.active_blocks / stats.total_blocks if stats.total_blocks else 0.0)
    yield used
