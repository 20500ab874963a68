"""Readers, submissions and the engine share one event loop: who goes first, and that nobody is left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain

import pytest

import slotline
from slotline import SamplingParams
from slotline.backend import BackendEntry
from slotline.errors import EngineClosed
from slotline.hookspecs import hookimpl
from slotline.mailbox import Choice, Mailbox
from slotline.manager import PluginManager
from slotline.plugins.echo import VOCAB, open_model
from slotline.testing.sim import SimBackend, SimHandle, sim_answer
from slotline.text import Vocabulary
from slotline.turns import TURN, Bell, Door


class Gated(SimBackend):
    """Holds launches, or results that are ready, until the test lets them go."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, VOCAB)
        self.hold_launch = self.hold_result = 0  # from which step on, counted from 1; 0 = none
        self.held = threading.Event()  # one is being held
        self.go = threading.Event()

    def stop_at(self, first: int) -> None:
        if first and len(self.plans) >= first:
            self.held.set()
            assert self.go.wait(30), "the test never let it go"

    def launch(self, plan):
        handle = super().launch(plan)
        self.stop_at(self.hold_launch)
        return GatedHandle(handle.result(), self)

    @hookimpl
    def slotline_register_backends(self, register):
        register(BackendEntry(name="gated", create=lambda: self, open_model=open_model))


class GatedHandle(SimHandle):
    def __init__(self, result, backend):
        super().__init__(result)
        self._backend = backend

    def result(self):
        self._backend.stop_at(self._backend.hold_result)
        return super().result()


@asynccontextmanager
async def opened(backend: Gated, **options: object) -> AsyncIterator[slotline.Engine]:
    manager = await asyncio.to_thread(PluginManager, "")
    manager.register(backend, "gated")
    defaults = {"max_slots": 4, "kv_cache_tokens": 1024, "max_model_len": 256}
    async with slotline.Engine.open("sim", backend="gated", manager=manager, **(defaults | options)) as engine:
        yield engine


async def some_turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def answer(prompt: str, max_tokens: int) -> list[int]:
    return sim_answer(list(prompt.encode()), 7, max_tokens, VOCAB, ())


async def read(engine: slotline.Engine, prompt: str, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(seed=7, max_tokens=max_tokens, ignore_eos=True)
    return [piece.token_ids async for piece in engine.stream(prompt, params)]


def joined(pieces: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(pieces))


async def test_readers_are_woken_in_the_order_of_their_news_and_take_all_of_it() -> None:
    bell, vocabulary, taken = Bell(), Vocabulary(open_model(slotline.EngineConfig.of("echo")).tokenizer), []
    boxes = [Mailbox(vocabulary, bell) for _ in range(3)]
    choices = [Choice(box, None, seq_id=i, index=i, prompt_index=0) for i, box in enumerate(boxes)]

    async def reader(box: Mailbox) -> None:
        taken.extend((piece.index, piece.token_ids) for piece in await box.get())

    async with asyncio.TaskGroup() as group:
        for box in boxes:
            group.create_task(reader(box))
        await some_turns()
        for i, token in ((2, 5), (0, 6), (1, 7), (2, 8)):
            choices[i].ids.append(token)
            boxes[i].post(choices[i])
        assert len(bell) == 3, "each of them once"
        await some_turns()
        assert taken == []
        bell.wake(2)
        await some_turns()
        assert taken == [(2, [5, 8]), (0, [6])]
        choices[1].ids.append(9)
        boxes[1].post(choices[1])
        bell.wake(len(bell))
    assert taken[2:] == [(1, [7, 9])]


@pytest.mark.parametrize("hold", ["launch", "result"])
async def test_the_core_is_settled_once_the_thread_has_launched_and_read(hold, monkeypatch) -> None:
    monkeypatch.setattr(slotline.loop, "MOST_WAIT", 60)
    backend = Gated(depth=2)
    setattr(backend, f"hold_{hold}", 2)
    async with opened(backend) as engine:
        core = engine._client.core
        await core.settled()  # with nothing to do
        reading = asyncio.create_task(read(engine, "held", 4))
        await asyncio.to_thread(backend.held.wait, 30)
        waiting = asyncio.create_task(core.settled())
        await some_turns()
        assert not waiting.done()
        backend.go.set()
        await asyncio.wait_for(waiting, 30)
        assert joined(await reading) == answer("held", 4)


@pytest.mark.parametrize(("depth", "most"), [(1, 60), (2, 0.01)])
async def test_nobody_waits_for_a_launch_that_computes_or_hangs(depth, most, monkeypatch) -> None:
    monkeypatch.setattr(slotline.loop, "MOST_WAIT", most)
    backend = Gated(depth)
    backend.hold_launch = 1
    async with opened(backend, max_batch_tokens=8) as engine:
        reading = asyncio.create_task(read(engine, "it fills a step", 4))
        await asyncio.to_thread(backend.held.wait, 30)
        await asyncio.wait_for(engine._client.core.settled(), 30)
        assert not reading.done()
        backend.go.set()
        assert joined(await reading) == answer("it fills a step", 4)


async def test_news_for_many_wait_for_the_launch_that_follows_them(monkeypatch) -> None:
    monkeypatch.setattr(slotline.loop, "MOST_WAIT", 60)
    monkeypatch.setattr(slotline.engine, "TURN", 2)
    backend = Gated(depth=2)
    backend.hold_launch = 3  # it is launched when the news of the first are there
    async with opened(backend) as engine:
        few = asyncio.create_task(read(engine, "a", 6))
        await asyncio.to_thread(backend.held.wait, 30)
        await some_turns()
        assert engine.stats().generated_tokens == 1 and next(iter(engine._handles.values())).choices[0].total == 1
        backend.go.set()
        assert joined(await few) == answer("a", 6)

        backend.held.clear()
        backend.go.clear()
        backend.hold_launch = len(backend.plans) + 3
        params = SamplingParams(seed=7, max_tokens=6, ignore_eos=True)
        handles = [await engine.submit([prompt], params) for prompt in "abcd"]
        await asyncio.to_thread(backend.held.wait, 30)
        await some_turns()
        assert [handle.choices[0].total for handle in handles] == [0] * 4
        backend.go.set()
        done = [(await handle.completions())[0].token_ids for handle in handles]
        assert done == [answer(prompt, 6) for prompt in "abcd"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turn", [1, 3, 64])
async def test_every_token_arrives_whoever_goes_first(depth, turn, monkeypatch) -> None:
    monkeypatch.setattr(slotline.engine, "TURN", turn)
    prompts = [f"prompt {i}" for i in range(12)]
    async with opened(Gated(depth)) as engine:
        pieces = await asyncio.gather(*(read(engine, prompt, 25) for prompt in prompts))
    assert [joined(of_one) for of_one in pieces] == [answer(prompt, 25) for prompt in prompts]
    assert all(all(of_one) for of_one in pieces), "no piece without a token"


async def test_closing_wakes_readers_whose_turn_had_not_come(monkeypatch) -> None:
    monkeypatch.setattr(slotline.engine, "TURN", 1)
    asked = []

    async def once() -> None:
        """Let the news through, then the first reader, and nobody else."""
        asked.append(1)
        if len(asked) > 1:
            await asyncio.Event().wait()

    async with opened(Gated(1)) as engine:
        engine._client.make_way = once
        reading = [asyncio.create_task(read(engine, prompt, 1)) for prompt in "abc"]
        await asyncio.wait([reading[0]], timeout=30)
        await some_turns()
        assert [task.done() for task in reading] == [True, False, False]
    assert await asyncio.wait_for(asyncio.gather(*reading), 30) == [[answer(prompt, 1)] for prompt in "abc"]


async def test_a_crowd_goes_through_the_door_in_order_and_in_turns() -> None:
    entered: list[int] = []
    turns: list[int] = []  # how many were through before each turn but the first

    async def make_way() -> None:
        turns.append(len(entered))

    door = Door(make_way)

    async def enter(number: int) -> None:
        await door.enter()
        entered.append(number)

    letting_in = asyncio.create_task(door.run())
    tasks = [asyncio.create_task(enter(i)) for i in range(3 * TURN)]
    await asyncio.sleep(0)
    tasks[TURN + 1].cancel()  # it waits
    await asyncio.wait(tasks)
    assert entered == [i for i in range(3 * TURN) if i != TURN + 1]
    assert turns == [TURN, 2 * TURN - 1]
    await some_turns()
    await asyncio.gather(*(enter(-1) for _ in range(TURN)))
    assert len(turns) == 2, "a turn's worth goes through at once again"
    late = [asyncio.create_task(enter(-2)) for _ in range(TURN)]
    await asyncio.sleep(0)
    letting_in.cancel()
    await asyncio.wait_for(asyncio.gather(*late), 30)  # nobody is locked out
    await asyncio.wait_for(asyncio.gather(*(enter(-3) for _ in range(3 * TURN))), 30)  # nor whoever comes later


async def test_who_waits_at_the_door_when_the_engine_closes_is_told() -> None:
    async with opened(Gated(1), max_queue=200) as engine:
        engine._client.make_way = engine._door._make_way = asyncio.Event().wait
        asking = [asyncio.create_task(read(engine, "x", 1)) for _ in range(TURN + 3)]
        await some_turns()
        assert not asking[-1].done()
    told = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
    assert [type(error) for error in told[-3:]] == [EngineClosed] * 3
