"""The engine process's side: one core, and any number of clients on a local socket.

Clients number their sequences as they like. Here each gets a number of the core's own, rising with
arrival, and news go back under the client's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np

import slotline
from slotline.client import health_of
from slotline.config import EngineConfig
from slotline.errors import EngineError, SlotlineError
from slotline.loading import load
from slotline.loop import EngineCore
from slotline.outputs import OutputBatch
from slotline.request import SequenceRequest
from slotline.stats import RequestCounts
from slotline.wire import (
    Abort,
    Accepted,
    Ask,
    Beat,
    Failure,
    Hello,
    Inquire,
    Report,
    Submit,
    ToClient,
    Told,
    frame,
    pack_batch,
    pack_error,
    read_frame,
    to_engine,
    unpack_submit,
)

T = TypeVar("T")

log = logging.getLogger("slotline")

BEAT = 0.5  # seconds between two signs of life
REPORT_WITHIN = 0.5  # seconds that a client gets to report its counts; then its last report counts
MAX_UNREAD = 256 * 2**20  # bytes that a client may leave unread before it is taken for dead
# From Python 3.13 on, a server takes its socket's path along when it ends; the next engine process listens there.
KEPT: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class EngineHost:
    """Serve one core to clients.

    Args:
        core: running, or about to.
        hello: what each client is told first.
    """

    def __init__(self, core: EngineCore, hello: Hello) -> None:
        self.core = core
        self._hello = frame(hello)
        self._peers: set[_Peer] = set()
        self._owner: dict[int, tuple[_Peer, int]] = {}  # the core's number -> whose, and its number there
        self._next = 0
        self._retired = RequestCounts()  # of clients that are gone

    async def serve(self, listener: socket.socket) -> None:
        """Take clients until cancelled."""
        server = await asyncio.start_unix_server(self._talk, sock=listener, **KEPT)
        try:
            async with server, anyio.create_task_group() as group:
                group.start_soon(self._deliver)
                group.start_soon(self._beat)
        finally:
            for peer in list(self._peers):
                peer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it is gone; what it had handed in ends."""
        peer = _Peer(writer)
        self._peers.add(peer)
        writer.write(self._hello)
        try:
            while True:
                self._take(peer, to_engine.decode(await read_frame(reader)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (msgspec.ValidationError, EngineError):
            log.exception("a client process sent what is no message")
        finally:
            self._peers.discard(peer)
            self._retired += peer.counts
            self._abort(peer, list(peer.ids))
            peer.close()

    def _take(self, peer: _Peer, message: Submit | Abort | Ask | Report) -> None:
        if isinstance(message, Submit):
            peer.send(Accepted(message.ticket, self._submit(peer, message)))
        elif isinstance(message, Abort):
            self._abort(peer, message.seq_ids)
        elif isinstance(message, Report):
            peer.report(message.counts)
        else:
            peer.counts = message.counts
            peer.start(self._tell(peer, message.ticket))

    # --- sequences --------------------------------------------------------------------

    def _submit(self, peer: _Peer, message: Submit) -> Failure | None:
        """Hand sequences to the core under its own numbers; return what is wrong, if anything is."""
        try:
            sequences = self._renumbered(peer, unpack_submit(message))
            self.core.submit(sequences)
        except SlotlineError as error:
            return pack_error(error)
        for asked, sequence in zip(message.sequences, sequences, strict=True):
            peer.ids[asked.seq_id] = sequence.seq_id
            self._owner[sequence.seq_id] = peer, asked.seq_id
        return None

    def _renumbered(self, peer: _Peer, requests: Sequence[SequenceRequest]) -> list[SequenceRequest]:
        numbers = {request.seq_id: self._next + k for k, request in enumerate(requests)}
        self._next += len(requests)
        return [
            replace(
                request,
                seq_id=numbers[request.seq_id],
                leader=None if request.leader is None else numbers.get(request.leader, peer.ids.get(request.leader)),
            )
            for request in requests
        ]

    def _abort(self, peer: _Peer, seq_ids: Sequence[int]) -> None:
        numbers = [number for seq_id in seq_ids if (number := peer.ids.pop(seq_id, None)) is not None]
        for number in numbers:
            self._owner.pop(number, None)
        self.core.abort(numbers)

    # --- news -------------------------------------------------------------------------

    async def _deliver(self) -> None:
        """Send each client its part of every step's news."""
        while True:
            batch = await self.core.next_outputs()
            for peer, part in self._split(batch):
                peer.send(pack_batch(part))

    def _split(self, batch: OutputBatch) -> list[tuple[_Peer, OutputBatch]]:
        """Return each client's part, under the client's own numbers."""
        owners = [self._owner.get(number) for number in batch.seq_ids.tolist()]
        rows: dict[_Peer, list[int]] = {}
        for row, owner in enumerate(owners):
            if owner is not None:  # else it was aborted, or its client is gone, while this step was in flight
                rows.setdefault(owner[0], []).append(row)
        admitted, errors = self._by_peer(batch.admitted), self._by_peer(batch.errors)
        embedded = self._by_peer(batch.embeddings)
        for number in (*batch.seq_ids[batch.finish > 0].tolist(), *(number for number, _ in batch.errors)):
            self._forget(number)
        own = np.array([-1 if owner is None else owner[1] for owner in owners], np.int64)
        renamed = replace(batch, seq_ids=own)
        return [
            (
                peer,
                replace(
                    _rows_of(renamed, rows.get(peer, ())),
                    admitted=tuple(admitted.get(peer, ())),
                    errors=tuple(errors.get(peer, ())),
                    embeddings=tuple(embedded.get(peer, ())),
                ),
            )
            for peer in {**rows, **admitted, **errors}
        ]

    def _by_peer(self, entries: Sequence[tuple[int, T]]) -> dict[_Peer, list[tuple[int, T]]]:
        found: dict[_Peer, list[tuple[int, T]]] = {}
        for number, what in entries:
            owner = self._owner.get(number)
            if owner is not None:
                found.setdefault(owner[0], []).append((owner[1], what))
        return found

    def _forget(self, number: int) -> None:
        owner = self._owner.pop(number, None)
        if owner is not None:
            owner[0].ids.pop(owner[1], None)

    # --- counts and signs of life -----------------------------------------------------

    async def _tell(self, peer: _Peer, ticket: int) -> None:
        """Answer a scrape with the counts of all other clients, fresh where they report in time."""
        others = [other for other in self._peers if other is not peer]
        with anyio.move_on_after(REPORT_WITHIN):
            await asyncio.gather(*(other.fresh_report() for other in others))
        total = self._retired
        for other in others:
            total += other.counts
        peer.send(Told(ticket, self.core.stats(), total))

    async def _beat(self) -> None:
        while True:
            health = health_of(self.core)
            for peer in list(self._peers):
                peer.send(Beat(health.status, health.detail, self.core.stats()))
            await asyncio.sleep(BEAT)


class _Peer:
    """One client.

    Attributes:
        ids: its live sequences: its own number -> the core's.
        counts: what it last reported.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.ids: dict[int, int] = {}
        self.counts = RequestCounts()
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: asyncio.Future[None] | None = None

    def send(self, message: ToClient) -> None:
        """Write a message, without waiting for the client to read it."""
        self._writer.write(frame(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            log.error("a client process reads nothing any more; hanging up")
            self._writer.transport.abort()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it is done or the client is gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def report(self, counts: RequestCounts) -> None:
        """Take what the client has counted."""
        self.counts = counts
        if self._reported is not None and not self._reported.done():
            self._reported.set_result(None)

    async def fresh_report(self) -> None:
        """Wait for a report that begins now."""
        self._reported = asyncio.get_running_loop().create_future()
        self.send(Inquire())
        await self._reported

    def close(self) -> None:
        """Let go of the connection, and of whoever waits for a report."""
        for task in self._tasks:
            task.cancel()
        if self._reported is not None and not self._reported.done():
            self._reported.set_result(None)
        self._writer.close()


def _rows_of(batch: OutputBatch, rows: Sequence[int]) -> OutputBatch:
    keep = np.zeros(len(batch.seq_ids), np.bool_)
    keep[list(rows)] = True
    return batch.select(keep)


@asynccontextmanager
async def hosting(config: EngineConfig, listener: socket.socket) -> AsyncIterator[EngineCore]:
    """Load a model and serve its core on a listening socket, for as long as the block runs."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="slotline-backend")
    try:
        loaded, reload = await load(config, None, thread)
        core = EngineCore(loaded.config, loaded.backend, loaded.info, thread, reload)
        hello = Hello(
            slotline.__version__,
            loaded.config.backend,
            core.scheduler.longest,
            loaded.backend.capabilities,
            loaded.info,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(core.run)
            group.start_soon(EngineHost(core, hello).serve, listener)
            try:
                yield core
            finally:
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await core.close()
    finally:
        thread.shutdown(wait=False)
