"""The trace that a caller's request belongs to, for observers that continue it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

# Headers of W3C trace context (traceparent, tracestate) as they came with a request. A surface sets it in the
# task that submits, and an observer of "admitted" reads it there; no thread or other task ever sees it.
trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("slotline_trace_headers", default=None)
