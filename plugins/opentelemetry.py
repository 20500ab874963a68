"""A span for each request, in OpenTelemetry's terms; nothing of what it said.

Where a variable of OpenTelemetry's names an endpoint (``OTEL_EXPORTER_OTLP_ENDPOINT`` or
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``), spans are sent there by a provider that is this plugin's own.
Elsewhere they go to the provider that the host application has set, if any; without one they cost
a look at a variable. A span continues the trace that a request's ``traceparent`` header names, or
the one that is current where a host submits.
"""

from __future__ import annotations

import os
import time
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slotline.hookspecs import hookimpl
from slotline.tracing import trace_headers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from slotline.request import RequestEvent

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SPAN = "opentelemetry.span"  # where a request keeps its span between its events


@hookimpl
def slotline_observe_request(event: RequestEvent) -> None:
    """Begin a span when a request is admitted, mark its first token, end it when it has finished."""
    if event.kind == "admitted":
        tracer = _tracer()
        if tracer is not None:
            attributes: dict[str, str | int] = {
                "slotline.request_id": event.request_id,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
            }
            event.extra[SPAN] = tracer.start_span("llm_request", context=_parent(), attributes=attributes)
        return
    span = event.extra.get(SPAN)
    if span is None:
        return
    if event.kind == "first_token":
        span.add_event("first_token")
    else:
        _end(span, event)


def _end(span: Any, event: RequestEvent) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("gen_ai.usage.output_tokens", event.completion_tokens)
    span.set_attribute("gen_ai.response.finish_reasons", [event.finish_reason or "error"])
    if event.error is not None:
        span.set_attribute("error.type", type(event.error).__name__)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_time=time.time_ns())


def _parent() -> Context | None:
    """Return the context of the caller's trace; None is the one that is current."""
    headers = trace_headers.get()
    if headers is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)


@cache
def _tracer() -> Tracer | None:
    """Return what makes spans; None where OpenTelemetry is not installed."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.trace") is None:
        return None
    from opentelemetry import trace

    if not any(os.environ.get(name) for name in ENDPOINTS):
        return trace.get_tracer("slotline")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "slotline")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("slotline")
