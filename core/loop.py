"""The engine core: one loop that launches steps ahead, takes in results, and posts the news.

It runs on the event loop it was opened on; the backend runs on one thread of its own. With a
pipeline depth of 2, step N + 1 is launched before the result of step N is there, and N + 2
before anybody reads what N said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from slotline.backend import Backend, BackendInfo, StepHandle, is_ready
from slotline.blocks import BlockPool
from slotline.errors import DeadlineExceeded, EngineClosed, EngineUnhealthy, SlotlineError, StepFailed
from slotline.outputs import OutputBatch, error_batch
from slotline.plan import StepPlan, StepResult
from slotline.queue import RequestQueue
from slotline.request import SequenceRequest
from slotline.scheduler import Scheduler
from slotline.stats import CoreStats, StepMeter

if TYPE_CHECKING:
    from slotline.config import EngineConfig

T = TypeVar("T")

log = logging.getLogger("slotline")

MOST_WAIT = 0.02  # seconds that others wait for the backend's thread
QUIET = 1.0  # seconds without work before the books are checked: it takes milliseconds, which a reader would wait for


class EngineCore:
    """Own the scheduler and the backend thread; speak in sequences and columns.

    Args:
        config: the engine's options.
        backend: loaded, on ``thread``.
        info: what loading said.
        thread: the one thread the backend runs on.
        reload: makes and loads a new backend; runs on the thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        info: BackendInfo,
        thread: ThreadPoolExecutor,
        reload: Callable[[], Backend],
    ) -> None:
        self.backend = backend
        self.info = info
        self.depth = config.pipeline_depth or backend.capabilities.pipeline_depth
        pool = BlockPool(info.num_blocks, info.block_size, prefix_caching=config.prefix_caching)
        queue = RequestQueue(
            config.max_slots + config.max_queue,
            max_tokens=config.max_queued_tokens,
            max_per_client=config.max_queue_per_client,
            max_bypass=config.max_bypass,
        )
        budget = config.max_batch_tokens or info.batch_tokens
        self.scheduler = Scheduler(config.max_slots, info.max_model_len, budget, pool, queue, info.tile_tokens)
        self.error: SlotlineError | None = None
        self.restarts = 0
        self.host_seconds = 0.0
        self._meter = StepMeter()
        self._thread = thread
        self._reload = reload
        self._launched: deque[tuple[Future[StepHandle], float]] = deque()
        self._wake = asyncio.Event()
        self._news: asyncio.Queue[OutputBatch] = asyncio.Queue()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._stall_timeout = config.stall_timeout
        self._last_progress = time.monotonic()
        self._stirred = asyncio.Event()  # a step was launched or taken in
        self._failed_before = False  # the step before failed too
        self._checked = True  # no step since the books were checked

    # --- for clients ------------------------------------------------------------------

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Take in sequences, all or none.

        Raises:
            OverloadError: the caps are reached.
            EngineError: the engine cannot run.
        """
        if self.error is not None:
            raise self.error
        self.scheduler.add(requests)
        self._meter.arrived((r.seq_id for r in requests), time.perf_counter())
        for request in requests:
            if request.deadline is not None:
                timer = asyncio.get_running_loop().call_later(request.deadline, self._expire, request.seq_id)
                self._timers[request.seq_id] = timer
        self._wake.set()

    def abort(self, seq_ids: Sequence[int]) -> None:
        """End sequences wherever they are; unknown ones are none of its business."""
        for seq_id in seq_ids:
            self._forget(seq_id)
            if self.scheduler.abort(seq_id):
                self._wake.set()

    async def next_outputs(self) -> OutputBatch:
        """Wait for and return the next news."""
        return await self._news.get()

    @property
    def has_news(self) -> bool:
        """Tell whether ``next_outputs`` would return at once."""
        return not self._news.empty()

    async def settled(self) -> None:
        """Wait, for MOST_WAIT at most, while the backend's thread wants the interpreter, to launch or to read a result.

        Whoever is about to keep the event loop busy calls this first: the thread gets its turn only when the loop has
        nothing more to do, and the device may have run dry by then.
        """
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_WAIT):
                while self._is_pressing():
                    self._stirred.clear()
                    newest = self._launched[-1][0]
                    if not newest.done():  # otherwise a result is there, and taking it in will stir
                        newest.add_done_callback(lambda _: loop.call_soon_threadsafe(self._stirred.set))
                    await self._stirred.wait()

    def _is_pressing(self) -> bool:
        if self.depth < 2 or not self._launched:  # with one step in flight, launching may be the computing itself
            return False
        oldest, newest = self._launched[0][0], self._launched[-1][0]
        return not newest.done() or (oldest.exception() is None and is_ready(oldest.result()))

    def stats(self) -> CoreStats:
        """Return the counters."""
        s, blocks = self.scheduler, self.scheduler.pool.counts()
        return CoreStats(
            running=len(s.running),
            waiting=len(s.queue),
            max_slots=s.rows.slots.max_slots,
            total_blocks=blocks.total,
            free_blocks=blocks.free,
            active_blocks=blocks.active,
            cached_blocks=blocks.cached,
            steps=s.counts.steps,
            scheduled_tokens=s.counts.scheduled_tokens,
            generated_tokens=s.counts.generated_tokens,
            preemptions=s.counts.preemptions,
            prefix_queries=s.counts.prefix_queried_tokens,
            prefix_hits=s.counts.prefix_hit_tokens,
            step_seconds=self._meter.step_seconds,
            device_seconds=self._meter.device_seconds,
            host_seconds=self.host_seconds,
            restarts=self.restarts,
            padded_tokens=getattr(self.backend, "padded_tokens", 0),
            queued_tokens=s.queue.queued_tokens,
            histograms=self._meter.snapshots(),
        )

    @property
    def wedged(self) -> bool:
        """Tell whether a launched step has given no result for too long."""
        return bool(self._launched) and time.monotonic() - self._last_progress > self._stall_timeout

    # --- the loop ---------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled. Whatever goes wrong ends requests with a typed error, never the host."""
        try:
            while self.error is None:
                self._launch_ahead()
                if not self._launched:
                    await self._rest()
                    continue
                try:
                    result = await self._on_thread(_fetch, self._launched[0][0])
                except Exception as error:
                    await self._recover(error)
                    continue
                batch = self._take_in(result)
                self._news.put_nowait(batch)
                self._stirred.set()
        except Exception as error:
            log.exception("the engine loop failed")
            self.give_up(EngineUnhealthy(f"the engine loop failed: {error!r}"))

    def _launch_ahead(self) -> None:
        """Launch steps until the pipeline is full or nothing more can be launched."""
        while self._launch_one():
            pass

    def _launch_one(self) -> bool:
        """Launch a step; return whether there was room and work for it."""
        if len(self._launched) >= self.depth:
            return False
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.scheduler.apply(plan)
        if not self._launched:
            self._last_progress = time.monotonic()
        self._checked = False
        now = time.perf_counter()
        self._launched.append((self._thread.submit(self._launch, plan), now))
        seats = self.scheduler.rows.slots.seq_id
        admitted = [int(seats[setup.row]) for setup in plan.admitted]
        self._meter.launched(admitted, len(plan), plan.num_tokens, now)
        self.host_seconds += time.perf_counter() - began
        return True

    def _launch(self, plan: StepPlan) -> StepHandle:
        return self.backend.launch(plan)

    async def _rest(self) -> None:
        """Wait for work; let the backend forget rows that ended, and check the books when it stays quiet."""
        ended = self.scheduler.take_ended()
        if ended:
            self._thread.submit(self.backend.release, ended)
        self._meter.rest()
        self._wake.clear()
        if not self._checked and self.scheduler.idle:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    await self._wake.wait()
                    return
            self.scheduler.check_integrity()
            self._checked = True
        await self._wake.wait()

    def _take_in(self, result: StepResult) -> OutputBatch:
        """Commit a result, launch what follows, and return the news."""
        began = time.perf_counter()
        _, since = self._launched.popleft()
        self._last_progress = time.monotonic()
        self._meter.took_in(since, began, result.device_ms, more=bool(self._launched))
        batch = self.scheduler.commit(result)
        self._failed_before = False
        self.host_seconds += time.perf_counter() - began
        self._launch_ahead()
        if self._timers:
            for seq_id in batch.seq_ids[batch.finish > 0].tolist():
                self._forget(seq_id)
        return batch

    def _expire(self, seq_id: int) -> None:
        self._forget(seq_id)
        if self.scheduler.abort(seq_id):
            self._news.put_nowait(
                error_batch(((seq_id, DeadlineExceeded("the request's deadline passed before it finished")),))
            )
            self._wake.set()

    def _forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence beside the scheduler: its deadline, its arrival."""
        self._meter.left(seq_id)
        timer = self._timers.pop(seq_id, None)
        if timer is not None:
            timer.cancel()

    # --- when a step fails ------------------------------------------------------------

    async def _recover(self, error: BaseException) -> None:
        """End the requests of the failed step and of those launched after it; start the backend anew."""
        log.error("a step failed: %r", error, exc_info=error)
        await self._settle_all()
        failed = self.scheduler.fail_inflight()
        for seq_id in failed:
            self._forget(seq_id)
        reason = StepFailed(f"the step that computed this request failed: {error!r}")
        self._news.put_nowait(error_batch(tuple((seq_id, reason) for seq_id in failed)))
        if self._failed_before:
            self.give_up(EngineUnhealthy(f"two steps in a row failed, the last with {error!r}"))
            return
        self._failed_before = True
        _forget_frames(error)
        try:
            await self._on_thread(self.backend.close)  # a new one may need the memory of the old one
            self.backend = await self._on_thread(self._reload)
            self.restarts += 1
        except Exception as failure:
            log.exception("the backend could not be restarted")
            self.give_up(EngineUnhealthy(f"the backend could not be restarted: {failure!r}"))

    def give_up(self, error: SlotlineError) -> None:
        """Refuse everything from now on and end what is left."""
        self.error = error
        self._end_all(error)

    def _end_all(self, error: SlotlineError) -> None:
        left = [*self.scheduler.running, *(s.seq_id for s in self.scheduler.queue.in_order())]
        self.abort(left)
        self._news.put_nowait(error_batch(tuple((seq_id, error) for seq_id in left)))

    async def close(self) -> None:
        """End what is left with EngineClosed, wait for the thread, close the backend."""
        if self.error is None:
            self.give_up(EngineClosed("the engine was closed"))
        await self._settle_all()
        await self._on_thread(self.backend.close)

    async def _settle_all(self) -> None:
        """Wait until all that was launched is over, and drop it."""
        for launched, _ in list(self._launched):  # the loop may still take one in
            await self._on_thread(_settle, launched)
        self._launched.clear()

    async def _on_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _fetch(launched: Future[StepHandle]) -> StepResult:
    """Wait for a step's result, on the backend's thread."""
    return launched.result().result()


def _forget_frames(error: BaseException | None) -> None:
    """Empty the frames that an error and its causes went through: they hold tensors of the backend that failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # causes may go round
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _settle(launched: Future[StepHandle]) -> None:
    """Wait until a step is over, whatever came of it."""
    try:
        launched.result().result()
    except Exception as error:
        log.debug("a step launched after the failed one: %r", error)
