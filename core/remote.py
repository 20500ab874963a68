"""An EngineClient whose core runs in another process, on the far end of a local socket.

The connection is the engine's life as this side sees it: when it breaks, every sequence that was
handed in ends with EngineLost, and the client waits for the next engine on the same path.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

import slotline
from slotline.backend import BackendInfo, Capabilities
from slotline.client import Health
from slotline.errors import EngineClosed, EngineError, EngineLost, EngineUnhealthy, SlotlineError
from slotline.outputs import OutputBatch, error_batch
from slotline.request import SequenceRequest
from slotline.stats import CoreStats, RequestCounts
from slotline.wire import (
    Abort,
    Accepted,
    Ask,
    Beat,
    Hello,
    Inquire,
    Outputs,
    Report,
    ToClient,
    Told,
    frame,
    pack_submit,
    read_frame,
    to_client,
    unpack_batch,
    unpack_error,
)

log = logging.getLogger("slotline")

RETRY = 0.2  # seconds until the next look for an engine where nothing listens
SILENT_AFTER = 10.0  # seconds without a beat after which an engine process is not well


class RemoteClient:
    """Speak to an engine process.

    Args:
        path: of its socket.
        counts: returns what this side has counted; a scrape on another side asks for it.
    """

    def __init__(self, path: str, counts: Callable[[], RequestCounts] = RequestCounts) -> None:
        self.counts = counts
        self.error: SlotlineError | None = None
        self.latest = CoreStats()
        self._path = path
        self._hello: Hello | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._greeted = asyncio.Event()
        self._live: set[int] = set()
        self._tickets: dict[int, asyncio.Future[Accepted | Told]] = {}
        self._numbers = itertools.count(1)
        self._news: asyncio.Queue[OutputBatch] = asyncio.Queue()
        self._health = Health("loading", "the engine process is starting")
        self._heard = time.monotonic()

    # --- what the engine is -----------------------------------------------------------

    async def greeted(self) -> None:
        """Wait for an engine; ``run`` must be running.

        Raises:
            EngineError: it is not of this version.
        """
        await self._greeted.wait()
        if self.error is not None:
            raise self.error

    @property
    def hello(self) -> Hello:
        """Return what the engine said of itself; ``greeted`` first."""
        assert self._hello is not None, "no engine has said anything yet"
        return self._hello

    @property
    def backend(self) -> str:
        """Return the name of the backend."""
        return self.hello.backend

    @property
    def capabilities(self) -> Capabilities:
        """Return what the backend can do."""
        return self.hello.capabilities

    @property
    def info(self) -> BackendInfo:
        """Return what the backend said after loading."""
        return self.hello.info

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that can run."""
        return self.hello.longest

    @property
    def silence(self) -> float:
        """Return the seconds since an engine process that is connected has last said something of itself."""
        return 0.0 if self._writer is None else time.monotonic() - self._heard

    # --- the connection ---------------------------------------------------------------

    async def run(self) -> None:
        """Hold a connection, and find the next engine when it breaks."""
        while self.error is None:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(RETRY)
                continue
            try:
                await self._listen(reader, writer)
            except (asyncio.IncompleteReadError, OSError, msgspec.ValidationError, EngineError) as error:
                log.warning("the connection to the engine process broke: %r", error)
            finally:
                self._lose()
                writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take messages until the connection breaks."""
        while True:
            message = to_client.decode(await read_frame(reader))
            if isinstance(message, Hello):
                self._greet(message, writer)
                if self.error is not None:
                    return
            else:
                self._take(message)

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        if hello.version != slotline.__version__:
            self.error = EngineUnhealthy(
                f"the engine process is of version {hello.version}, not {slotline.__version__}"
            )
        self._hello, self._writer = hello, writer
        self._heard, self._health = time.monotonic(), Health("ok")
        self._greeted.set()

    def _take(self, message: ToClient) -> None:
        if isinstance(message, Outputs):
            batch = unpack_batch(message)
            self._live.difference_update(batch.seq_ids[batch.finish > 0].tolist(), (i for i, _ in batch.errors))
            self._news.put_nowait(batch)
        elif isinstance(message, Accepted | Told):
            waiting = self._tickets.pop(message.ticket, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, Inquire):
            self._send(frame(Report(self.counts())))
        elif isinstance(message, Beat):
            self._heard, self.latest = time.monotonic(), message.core
            self._health = Health("ok") if message.status == "ok" else Health("wedged", message.detail)
            self._send(frame(Report(self.counts())))

    def _lose(self) -> None:
        """End everything that was handed in: the engine that had it is gone."""
        self._writer = None
        self._health = Health("loading", "the engine process is being started again")
        lost = EngineLost("the engine process ended while it ran this request; try again")
        live, self._live = self._live, set()
        tickets, self._tickets = self._tickets, {}
        for waiting in tickets.values():
            if not waiting.done():
                waiting.set_exception(lost)
        if live:
            self._news.put_nowait(error_batch(tuple((seq_id, lost) for seq_id in sorted(live))))

    def _send(self, data: bytes) -> None:
        if self._writer is not None:
            self._writer.write(data)

    async def _ask(self, ticket: int, data: bytes) -> Accepted | Told:
        """Send what is answered under a ticket, and wait for that."""
        waiting: asyncio.Future[Accepted | Told] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = waiting
        self._send(data)
        try:
            return await waiting
        finally:
            self._tickets.pop(ticket, None)

    # --- EngineClient -----------------------------------------------------------------

    async def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Hand in sequences, all or none."""
        if self.error is not None:
            raise self.error
        if self._writer is None:
            raise EngineLost("the engine process is being started; try again")
        if self.silence > SILENT_AFTER:  # it would wait there unseen, and its deadline with it
            raise EngineLost("the engine process does not respond; try again")
        ids = [request.seq_id for request in requests]
        ticket = next(self._numbers)
        data = pack_submit(ticket, requests)
        self._live.update(ids)
        try:
            answer = await self._ask(ticket, data)
        except BaseException:
            self.abort(ids)  # in order behind the submission, which may have come in
            raise
        assert isinstance(answer, Accepted)
        if answer.failure is not None:
            self._live.difference_update(ids)
            raise unpack_error(answer.failure)

    def abort(self, seq_ids: Sequence[int]) -> None:
        """End sequences."""
        self._live.difference_update(seq_ids)
        self._send(frame(Abort(list(seq_ids))))

    async def next_outputs(self) -> OutputBatch:
        """Wait for the news of the next step."""
        return await self._news.get()

    @property
    def has_news(self) -> bool:
        """Tell whether ``next_outputs`` would return at once."""
        return not self._news.empty()

    async def make_way(self) -> None:
        """Return at once: the core has an interpreter of its own."""

    async def stats(self, counts: RequestCounts) -> tuple[CoreStats, RequestCounts]:
        """Return the core's counters and those of all clients; while there is no engine, what is known here."""
        if self._writer is None:
            return self.latest, counts
        ticket = next(self._numbers)
        try:
            answer = await self._ask(ticket, frame(Ask(ticket, counts)))
        except EngineLost:
            return self.latest, counts
        assert isinstance(answer, Told)
        self.latest = answer.core
        return answer.core, counts + answer.others

    def health(self) -> Health:
        """Tell what the engine process last said of itself, if that is not too long ago."""
        if self.error is not None:
            return Health("unhealthy", self.error.message)
        if self.silence > SILENT_AFTER:
            return Health("wedged", f"the engine process has said nothing for {SILENT_AFTER:g} seconds")
        return self._health

    def give_up(self, error: SlotlineError) -> None:
        """Refuse everything from now on; the engine process goes on for others."""
        self.error = error
        if self._writer is not None:
            self._writer.close()

    async def close(self) -> None:
        """Hang up; the engine process ends what this side had handed in."""
        self.give_up(self.error or EngineClosed("the engine was closed"))

    def check_integrity(self) -> None:
        """Do nothing: the tables are in the engine process, which looks at them whenever it rests."""
