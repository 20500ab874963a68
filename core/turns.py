"""Turns: readers and submissions go some at a time, so that the engine, on the same event loop, can go between them.

A step has news for hundreds of readers, and a crowd brings hundreds of submissions. All at once they would keep the
engine from its next step, and its backend's thread from the interpreter, for as long as they take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotline.mailbox import Mailbox

TURN = 64  # how many go at a time


class Bell:
    """Readers that have news and were not woken yet, in the order in which the news came.

    One whose turn comes late takes the tokens of several steps in one piece.
    """

    def __init__(self) -> None:
        self._due: deque[Mailbox] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def ring(self, box: Mailbox) -> None:
        """Line a reader up."""
        self._due.append(box)

    def wake(self, count: int) -> None:
        """Wake the first ``count`` readers, or as many as there are."""
        for _ in range(min(count, len(self._due))):
            self._due.popleft().wake()


class Door:
    """Where submissions of a crowd wait for their turn, first come, first served.

    Args:
        make_way: waits until whoever goes first has gone.
    """

    def __init__(self, make_way: Callable[[], Awaitable[None]]) -> None:
        self._make_way = make_way
        self._closed = False
        self._passed = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._crowded = asyncio.Event()

    async def enter(self) -> None:
        """Go through, at once unless as many as a turn lets through just did."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        if self._passed == TURN:
            future = loop.create_future()
            self._waiting.append(future)
            self._crowded.set()
            await future
            return
        if not self._passed:
            loop.call_soon(self._end_turn)
        self._passed += 1

    def _end_turn(self) -> None:
        if not self._waiting:
            self._passed = 0

    async def run(self) -> None:
        """Let those through that wait, until cancelled; from then on everybody goes through at once."""
        try:
            while True:
                await self._crowded.wait()
                await self._make_way()
                self._let_through(TURN)
                if not self._waiting:
                    self._crowded.clear()
                    self._passed = 0
                await asyncio.sleep(0)  # those let through submit
        finally:
            self._closed = True
            self._let_through(len(self._waiting))

    def _let_through(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            future = self._waiting.popleft()
            if not future.done():  # its task may have been cancelled
                future.set_result(None)
