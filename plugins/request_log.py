"""A line in the log for each request that ends; nothing of what it said.

The logger ``slotline.requests`` gets one line at INFO when a request has finished, and at DEBUG one
when it was admitted and one with its first token. Switch it on as any logger::

    logging.getLogger("slotline.requests").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging

from slotline.hookspecs import hookimpl
from slotline.request import RequestEvent

log = logging.getLogger("slotline.requests")


@hookimpl
def slotline_observe_request(event: RequestEvent) -> None:
    """Log the event."""
    level = logging.INFO if event.kind == "finished" else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    whose = f" of {event.client!r}" if event.client is not None else ""
    tokens = f"{event.prompt_tokens} prompt and {event.completion_tokens} answer tokens"
    if event.kind != "finished":
        log.debug("%s%s: %s, %s", event.request_id, whose, event.kind.replace("_", " "), tokens)
    elif event.error is None:
        log.info("%s%s: finished (%s), %s", event.request_id, whose, event.finish_reason, tokens)
    else:
        what = f"{type(event.error).__name__}: {event.error}"
        log.info("%s%s: finished (%s), %s; %s", event.request_id, whose, event.finish_reason, tokens, what)
