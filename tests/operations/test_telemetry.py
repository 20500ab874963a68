"""What an operator sees: log lines, metrics, the dashboard over them, traces."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

import slotline
from slotline.apis.cli.logs import JsonFormatter, ThreadedHandler
from slotline.plugins.prometheus import PrometheusSink
from slotline.stats import RequestStats, StepMeter, engine_stats

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "slotline.json"
SECRET = "a secret of mine"

# The names and labels of vLLM's metrics that dashboards and autoscalers read.
VLLM_GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
VLLM_COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
}
VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}


# Log


def test_the_access_log_is_json_with_request_ids(server):
    replies = [
        httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "echo", "prompt": SECRET, "max_tokens": 4},
            headers={"x-request-id": "mine-1"},
        ),
        server.post(prompt=SECRET, stream=True),
        httpx.get(f"{server.url}/v1/models?secret={SECRET}"),
        server.post(prompt=SECRET, temperature=99),
        httpx.get(f"{server.url}/nope"),
    ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert ids[0] == "mine-1" and len(set(ids)) == len(ids)
    found: dict[str, dict] = {}
    while not found.keys() >= set(ids):  # lines are written by a thread
        found = {line["request_id"]: line for line in map(json.loads, server.log.splitlines()) if "request_id" in line}
    lines = [found[each] for each in ids]
    assert [line["status"] for line in lines] == [200, 200, 200, 400, 404]
    assert [line["path"] for line in lines[:3]] == ["/v1/completions", "/v1/completions", "/v1/models"]
    assert all(line["complete"] and line["bytes"] > 0 and line["ms"] >= line["first_ms"] >= 0 for line in lines)
    assert SECRET not in server.log


async def test_no_prompt_is_logged_whatever_goes_wrong(caplog, monkeypatch):
    """What is logged at the default level of a request that a step fails under."""
    from slotline.apis.openai import create_app
    from slotline.plugins.echo import EchoBackend

    def fail(*_):
        raise RuntimeError("the device is on fire")

    caplog.set_level(logging.INFO)
    async with slotline.Engine.open("echo", backend="echo") as engine:
        app = create_app(engine)
        monkeypatch.setattr(EchoBackend, "_next", fail)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            reply = await client.post("/v1/completions", json={"model": "echo", "prompt": SECRET, "max_tokens": 3})
    assert reply.status_code == 500 and "fire" not in reply.text
    assert "fire" in caplog.text and SECRET not in caplog.text


def test_a_log_that_nobody_takes_costs_lines_and_no_time():
    read, write = os.pipe()
    handler = ThreadedHandler(write, kept=10)
    handler.setFormatter(JsonFormatter())
    record = logging.LogRecord("x", logging.INFO, "x", 1, "%s", ("y" * 10_000,), None)
    for _ in range(100):
        handler.emit(record)  # a blocking write would hang here: nobody reads the pipe
    assert handler.dropped >= 100 - 10 - 65536 // 10_000 - 1
    os.close(read)
    handler.close()
    os.close(write)


def test_a_line_that_cannot_be_formatted_is_dropped(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        handler = ThreadedHandler(file.fileno())
        handler.setFormatter(JsonFormatter())
        handler.emit(logging.LogRecord("x", logging.INFO, "x", 1, "%d", ("no number",), None))
        handler.emit(logging.LogRecord("x", logging.INFO, "x", 1, "\ud800 fine", (), None))
        handler.close()
    assert handler.dropped == 1
    assert json.loads((tmp_path / "log").read_text())["message"] == "? fine"


# Metrics


def families(text: str) -> dict:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics_have_the_names_that_vllm_gave_them(server):
    server.post(prompt="abc")
    found = families(httpx.get(f"{server.url}/metrics").text)
    for names, kind in ((VLLM_GAUGES, "gauge"), (VLLM_COUNTERS, "counter"), (VLLM_HISTOGRAMS, "histogram")):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert all(s.labels["model_name"] == "echo" and s.labels["engine"] == "0" for s in family.samples)
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


async def test_steps_gaps_queue_and_blocks_are_counted():
    async with slotline.Engine.open("echo", backend="echo", max_slots=2, echo_delay=0.01, pipeline_depth=1) as engine:
        params = slotline.SamplingParams(max_tokens=5, ignore_eos=True)
        handles = [await engine.submit(["abcd"], params) for _ in range(4)]
        waiting = engine.stats()
        assert waiting.queued_tokens == 16 and waiting.waiting == 4
        for handle in handles:
            await handle.completions()
        stats = engine.stats()
    seen = stats.histograms
    assert stats.requests_started == sum(stats.requests_finished.values()) == 4
    assert seen["queue_time"].count == 4 and seen["queue_time"].total > 2 * 5 * 0.009  # two waited for the others
    assert seen["step_time"].count == seen["step_tokens"].count == stats.steps
    assert seen["step_gap"].count == stats.steps - 1  # one step at a time, and never idle between the first and last
    assert seen["step_tokens"].total == stats.scheduled_tokens and seen["step_rows"].total >= 4 * 5
    assert seen["inter_token"].count == 4 * 4 and seen["inter_token"].total > 16 * 0.009
    assert seen["decode_time"].count == 4
    assert stats.active_blocks == 0 and stats.total_blocks == stats.free_blocks + stats.cached_blocks


async def test_every_request_is_in_one_count():
    async with slotline.Engine.open("echo", backend="echo", max_slots=2, max_queue=4, echo_delay=0.005) as engine:
        params = slotline.SamplingParams(max_tokens=50, ignore_eos=True)
        handles = [await engine.submit(["abcd"], params) for _ in range(6)]
        with pytest.raises(slotline.errors.QueueFull):
            await engine.submit(["abcd"], params)
        reading = aiter(handles[0])
        while engine.stats().running < 2:
            await anext(reading)
        handles[1].abort()
        handles[5].abort()
        now = engine.stats()
        done = sum(now.requests_finished.values())
        assert now.requests_started == 6 == done + now.running + now.waiting and now.requests_finished["abort"] == 2
        await reading.aclose()
        assert engine.stats().requests_finished["abort"] == 3


def test_padding_is_shown_where_a_backend_counts_it():
    stats = engine_stats(slotline.stats.CoreStats(padded_tokens=7), RequestStats().counts(), 1.0)
    (sample,) = families(PrometheusSink().render(stats, "m").decode())["slotline:padded_tokens"].samples
    assert sample.value == 7


def test_counts_of_several_processes_add_up():
    one, two = RequestStats(), RequestStats()
    for stats, n in ((one, 2), (two, 3)):
        for _ in range(n):
            stats.started(10)
            stats.first_token(0.1)
            stats.ended("stop", 5, 1.0, 0.5)
    total = one.counts() + two.counts()
    assert total.started == total.finished["stop"] == 5 and total.prompt_tokens == 50
    assert total.histograms["request_latency"].count == 5 and total.histograms["request_latency"].total == 5.0


def test_the_dashboard_asks_for_metrics_that_are_there():
    core = slotline.stats.CoreStats(histograms=StepMeter().snapshots())
    text = PrometheusSink().render(engine_stats(core, RequestStats().counts(), 1.0), "m").decode()
    known = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"(?:slotline|vllm):\w+", expression)
        assert names and known >= set(names), expression


# Traces


class Collector:
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(data)
                owner.spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> Collector:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def test_requests_are_traced(serve):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with Collector() as collector:
        port = collector.server.server_address[1]
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        with serve(environ=environ) as server:
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            body = {"model": "echo", "prompt": SECRET, "max_tokens": 4}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            server.post(prompt=SECRET)
            assert server.stop() == 0  # what is not sent yet is sent at the end
        first, second = sorted(collector.spans, key=lambda s: s.start_time_unix_nano)
    assert first.trace_id.hex() == trace and first.parent_span_id.hex() == parent
    assert second.trace_id != first.trace_id and not second.parent_span_id
    attributes = {a.key: a.value for a in first.attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == len(SECRET)
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    assert [event.name for event in first.events] == ["first_token"]
    assert SECRET not in str(collector.spans)


async def test_a_host_sees_spans_by_its_own_provider(monkeypatch):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from slotline.plugins import opentelemetry as plugin

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("host")
    monkeypatch.setattr(plugin, "_tracer", lambda: tracer)
    async with slotline.Engine.open("echo", backend="echo", echo_delay=0.01) as engine:
        with tracer.start_as_current_span("mine") as mine:
            await engine.generate("abc")
        handle = await engine.submit(["abc"])
        handle.abort()
    done, own, aborted = exporter.get_finished_spans()
    assert own.name == "mine" and done.parent.span_id == mine.get_span_context().span_id
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert not any("prompt" in key for span in (done, aborted) for key in span.attributes)


# Health


def test_live_and_ready(server):
    for page in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(server.url + page).json() == {"status": "ok", "detail": ""}


@pytest.mark.parametrize(
    ("status", "live", "ready"),
    [("ok", 200, 200), ("loading", 200, 503), ("wedged", 503, 503), ("unhealthy", 503, 503), ("closed", 200, 503)],
)
async def test_a_process_is_alive_while_it_gets_on(status, live, ready, monkeypatch):
    from slotline.apis.openai import create_app

    async with slotline.Engine.open("echo", backend="echo") as engine:
        monkeypatch.setattr(engine, "health", lambda: slotline.Health(status, "why"))
        app = create_app(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert (await client.get("/health/live")).status_code == live
            assert (await client.get("/health/ready")).status_code == ready


async def test_health_is_by_progress(monkeypatch):
    """A step that gives no result makes the engine wedged; one that comes late makes it well again."""
    from slotline.plugins.echo import EchoHandle

    stuck, go_on = threading.Event(), threading.Event()
    result = EchoHandle.result
    monkeypatch.setattr(EchoHandle, "result", lambda self: (stuck.set(), go_on.wait(), result(self))[2])
    async with slotline.Engine.open("echo", backend="echo", stall_timeout=0.05) as engine:
        assert engine.health().status == "ok"
        handle = await engine.submit(["abc"])
        pieces = handle.pieces()
        first = asyncio.ensure_future(anext(pieces))
        while engine.health().status != "wedged":
            await asyncio.sleep(0)
        assert stuck.is_set()
        go_on.set()
        await first
        await pieces.aclose()
        assert engine.health().status == "ok"
