"""Conversations that the server keeps: so many, so long unused, one answer at a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from slotline.apis.openai.errors import ApiError


@dataclass(slots=True)
class Session:
    """One conversation.

    Attributes:
        messages: what was said, as templates read it.
        abort: ends the answer that is being given; None while none is.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    abort: Callable[[], None] | None = None
    busy: bool = False
    used: float = 0.0


class Sessions:
    """Keep conversations by key. The longest unused gives way to a new one, and none outlives its time.

    Args:
        most: how many are kept; 0 keeps none.
        timeout: seconds that one is kept after its last answer.
        clock: seconds that only go up.
    """

    def __init__(self, most: int, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._timeout = timeout
        self._clock = clock
        self._kept: OrderedDict[Hashable, Session] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def take(self, key: Hashable) -> Session:
        """Return the conversation of that key, or a new one, for one answer; ``release`` gives it back.

        Raises:
            ApiError: 409 while it is being answered, 503 where all that are kept are being answered,
                400 where none is kept.
        """
        if not self._most:
            message = "this server keeps no conversations; send the messages of each turn, or start it with sessions"
            raise ApiError(400, message, param="session_id", code="no_sessions")
        self.expire()
        session = self._kept.get(key)
        if session is None:
            self._make_room()
            session = self._kept[key] = Session()
        elif session.busy:
            message = "the session is answering; wait for the answer, or abort it"
            raise ApiError(409, message, type="conflict_error", param="session_id", code="session_busy")
        session.busy = True
        return session

    def release(self, key: Hashable, *, keep: bool) -> None:
        """Give a conversation back, to be kept or forgotten."""
        session = self._kept[key]
        session.busy, session.abort, session.used = False, None, self._clock()
        self._kept.move_to_end(key)
        if not keep or not session.messages:
            del self._kept[key]

    def forget(self, key: Hashable) -> None:
        """Forget a conversation that is not being answered."""
        session = self._kept.get(key)
        if session is not None and not session.busy:
            del self._kept[key]

    def abort(self, key: Hashable) -> bool:
        """End the answer that is being given; tell whether one was."""
        session = self._kept.get(key)
        if session is None or session.abort is None:
            return False
        session.abort()
        return True

    def expire(self) -> None:
        """Forget what nobody has used for too long."""
        before = self._clock() - self._timeout
        for key in [key for key, session in self._kept.items() if not session.busy and session.used < before]:
            del self._kept[key]

    def _make_room(self) -> None:
        if len(self._kept) < self._most:
            return
        oldest = next((key for key, session in self._kept.items() if not session.busy), None)
        if oldest is None:
            message = f"all {self._most} sessions that this server keeps are answering; try again later"
            raise ApiError(
                503, message, type="overloaded_error", code="too_many_sessions", headers={"Retry-After": "1"}
            )
        del self._kept[oldest]
