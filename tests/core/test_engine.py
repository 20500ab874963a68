"""The engine on a simulated backend: slots, abort, failure, deadlines, caps, statistics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import slotline
from slotline import SamplingParams
from slotline.backend import BackendEntry
from slotline.errors import (
    ClientLimitExceeded,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    EngineUnhealthy,
    InvalidParameter,
    NumericalError,
    QueueFull,
    RequestAborted,
    StepFailed,
    UnsupportedModel,
    UnsupportedParameter,
)
from slotline.hookspecs import hookimpl
from slotline.intake import choice_seed
from slotline.loop import _forget_frames
from slotline.manager import PluginManager
from slotline.plugins.echo import VOCAB, open_model
from slotline.request import RequestEvent
from slotline.testing.sim import SimBackend, SimHandle, sim_answer
from slotline.turns import TURN


class GatedHandle(SimHandle):
    """A result that stays away until the test lets it come."""

    def __init__(self, result, gate):
        super().__init__(result)
        self._gate = gate

    def result(self):
        assert self._gate.wait(30), "the test never opened the gate"
        return super().result()


class SimPlugin:
    """Registers one simulated backend; keeps what it made, and what observers saw."""

    def __init__(self, make: Callable[[], SimBackend]) -> None:
        self.make = make
        self.made: list[SimBackend] = []
        self.events: list[RequestEvent] = []

    def create(self) -> SimBackend:
        self.made.append(self.make())
        return self.made[-1]

    @hookimpl
    def slotline_register_backends(self, register: Callable[[BackendEntry], None]) -> None:
        register(BackendEntry(name="sim", create=self.create, open_model=open_model))

    @hookimpl
    def slotline_observe_request(self, event: RequestEvent) -> None:
        self.events.append(event)


class PickyBackend(SimBackend):
    """Runs no model of this kind."""

    def load(self, config, model):
        raise UnsupportedModel("it turns the wrong way")


@pytest.mark.parametrize("name", ["auto", "picky"])
async def test_auto_takes_the_next_best_where_a_backend_cannot_run_the_model(name, caplog) -> None:
    class Plugin:
        @hookimpl
        def slotline_register_backends(self, register: Callable[[BackendEntry], None]) -> None:
            entry = BackendEntry(name="picky", create=PickyBackend, open_model=open_model, auto_priority=99)
            register(entry)
            register(replace(entry, name="plain", create=SimBackend, auto_priority=98))

    manager = PluginManager("")
    manager.register(Plugin(), "both")
    opening = slotline.Engine.open("sim", backend=name, manager=manager)
    if name == "picky":
        with pytest.raises(UnsupportedModel, match="wrong way"):
            async with opening:
                pass
        return
    async with opening as engine:
        assert engine.config.backend == "plain"
        assert len((await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))).token_ids) == 2
    assert "picky: it turns the wrong way; taking backend plain" in caplog.text


@asynccontextmanager
async def opened(
    make: Callable[[], SimBackend] = SimBackend, depth: int = 1, **options: object
) -> AsyncIterator[tuple[slotline.Engine, SimPlugin]]:
    def build() -> SimBackend:
        backend = make()
        backend.depth, backend.vocab_size = depth, VOCAB
        return backend

    plugin = SimPlugin(build)
    manager = await asyncio.to_thread(PluginManager, "")
    manager.register(plugin, "sim")
    defaults = {"max_slots": 4, "kv_cache_tokens": 1024, "max_model_len": 256}
    async with slotline.Engine.open("sim", backend="sim", manager=manager, **(defaults | options)) as engine:
        yield engine, plugin
        await settled(engine)
        engine.check_integrity()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


async def settled(engine: slotline.Engine) -> None:
    """Wait until nothing runs, waits or is in flight."""
    for _ in range(10_000):
        if engine._client.core.scheduler.idle or engine.health().status != "ok":
            return
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(engine._client.core._thread, int)
    raise AssertionError("the engine did not come to rest")


def answer(prompt: str, seed: int, max_tokens: int, stop_ids: tuple[int, ...] = (256,)) -> list[int]:
    return sim_answer(list(prompt.encode()), seed, max_tokens, VOCAB, stop_ids)


both_depths = pytest.mark.parametrize("depth", [1, 2])


# --- answers --------------------------------------------------------------------------


@both_depths
async def test_many_requests_get_their_own_answers(depth: int, no_blocking: object) -> None:
    async with opened(depth=depth, max_batch_tokens=16) as (engine, _):
        prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(40)]
        params = [SamplingParams(seed=i, max_tokens=1 + i % 17) for i in range(40)]
        done = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))
        for i, completion in enumerate(done):
            expected = answer(prompts[i], i, 1 + i % 17)
            assert completion.token_ids == expected
            assert completion.text == engine.decode(expected)
            assert completion.usage.completion_tokens == len(expected)


@both_depths
async def test_choices_and_prompt_lists_come_back_in_order(depth: int) -> None:
    async with opened(depth=depth) as (engine, _):
        handle = await engine.submit(["one", "two"], SamplingParams(n=3, seed=5, max_tokens=6))
        done = await handle.completions()
        assert [[c.index for c in d.choices] for d in done] == [[0, 1, 2], [0, 1, 2]]
        assert done[0].token_ids == answer("one", 5, 6)
        assert done[1].choices[0].token_ids == answer("two", 5, 6)
        assert len({tuple(c.token_ids) for c in done[0].choices}) > 1
        again = await (await engine.submit(["one", "two"], SamplingParams(n=3, seed=5, max_tokens=6))).completions()
        assert [[c.token_ids for c in d.choices] for d in again] == [[c.token_ids for c in d.choices] for d in done]
        assert handle.usage.prompt_tokens == 6


@both_depths
async def test_a_stop_string_ends_a_row_and_hides_what_came_after(depth: int) -> None:
    async with opened(depth=depth) as (engine, _):
        whole = await engine.generate("stop me", SamplingParams(seed=1, max_tokens=60, ignore_eos=True))
        visible = whole.text
        stop = visible[20:22]
        cut = await engine.generate("stop me", SamplingParams(seed=1, max_tokens=60, ignore_eos=True, stop=stop))
        assert cut.text == visible[: visible.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) == cut.usage.completion_tokens < 60


async def test_a_stop_id_is_named_and_the_end_token_is_not() -> None:
    async with opened() as (engine, _):
        ids = answer("name it", 3, 40, ())
        by_id = await engine.generate("name it", SamplingParams(seed=3, max_tokens=40, stop_token_ids=[ids[5]]))
        assert (by_id.finish_reason, by_id.stop_reason) == ("stop", ids[5])
        assert by_id.token_ids == ids[: ids.index(ids[5]) + 1]
        for seed in range(4000):
            ids = answer("end", seed, 4)
            if ids[-1] == 256:
                break
        ended = await engine.generate("end", SamplingParams(seed=seed, max_tokens=4))
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", None, ids)


async def test_unread_pieces_merge() -> None:
    async with opened() as (engine, _):
        handle = await engine.submit(["merge"], SamplingParams(seed=2, max_tokens=20, ignore_eos=True))
        await until(lambda: handle.finished)
        pieces = [piece async for piece in handle]
        assert len(pieces) == 1 and pieces[0].token_ids == answer("merge", 2, 20, ())


# --- slots ----------------------------------------------------------------------------


@both_depths
async def test_a_waiting_request_takes_the_slot_in_the_next_step_planned(depth: int) -> None:
    """S0 and S1 run, S2 waits; S0 ends, S2 takes its slot, S1 never pauses."""
    async with opened(depth=depth, max_slots=2) as (engine, plugin):
        params = [SamplingParams(seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate((4, 20, 6))]
        handles = [await engine.submit([f"S{i}"], p) for i, p in enumerate(params)]
        await asyncio.gather(*(h.completions() for h in handles))
        plans = plugin.made[0].plans
        rows = [dict(zip(p.rows.tolist(), p.epoch.tolist(), strict=True)) for p in plans]
        assert rows[0] == {0: 0, 1: 0}
        s0 = [i for i, r in enumerate(rows) if r.get(0) == 0]
        s1 = [i for i, r in enumerate(rows) if r.get(1) == 0]
        s2 = [i for i, r in enumerate(rows) if r.get(0) == 1]
        assert len(s0) == 4 and s0 == list(range(4))
        assert s1 == list(range(20)), "S1 paused"
        # At depth 1 the end is known before the next step is planned; at depth 2 one more is out already.
        assert s2 == list(range(s0[-1] + depth, s0[-1] + depth + 6))


# --- ending early ---------------------------------------------------------------------


@both_depths
async def test_leaving_a_stream_gives_everything_back(depth: int) -> None:
    async with opened(depth=depth) as (engine, _):
        stream = engine.stream("leave", SamplingParams(seed=1, max_tokens=200, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        await settled(engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.active_blocks) == (0, 0, 0)
        assert stats.requests_finished["abort"] == 1


@both_depths
async def test_cancelling_a_reader_gives_everything_back(depth: int) -> None:
    async with opened(depth=depth) as (engine, _):
        task = asyncio.create_task(engine.generate("cancel", SamplingParams(seed=1, max_tokens=200, ignore_eos=True)))
        await until(lambda: engine.stats().generated_tokens)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().running == 0
        other = await engine.generate("still here", SamplingParams(seed=9, max_tokens=5))
        assert other.token_ids == answer("still here", 9, 5)


async def test_abort_by_id_in_every_state() -> None:
    async with opened(max_slots=1) as (engine, _):
        params = SamplingParams(seed=1, max_tokens=200, ignore_eos=True)
        running = await engine.submit(["a"], params, request_id="running")
        waiting = await engine.submit(["b"], params, request_id="waiting")
        assert engine.abort("waiting") and not engine.abort("waiting")
        assert engine.abort("running") and not engine.abort("running") and not engine.abort("unknown")
        for handle in (running, waiting):
            with pytest.raises(RequestAborted):
                await handle.completions()
        done = await engine.generate("c", SamplingParams(max_tokens=1, seed=1), request_id="running")
        assert not engine.abort("running") and len(done.token_ids) == 1


async def test_a_request_id_is_unique_while_it_lives() -> None:
    async with opened() as (engine, _):
        handle = await engine.submit(["a"], SamplingParams(max_tokens=50, ignore_eos=True), request_id="x")
        with pytest.raises(InvalidParameter, match="request_id"):
            await engine.submit(["b"], request_id="x")
        handle.abort()


async def test_a_deadline_ends_running_and_waiting_requests() -> None:
    import threading

    gate = threading.Event()

    class Slow(SimBackend):
        def launch(self, plan):
            return GatedHandle(super().launch(plan)._result, gate)

    async with opened(Slow, max_slots=1) as (engine, _):
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        running = await engine.submit(["a"], params, deadline=0.02)
        waiting = await engine.submit(["b"], params, deadline=0.01)
        for handle in (waiting, running):
            with pytest.raises(DeadlineExceeded):
                await handle.completions()
        gate.set()
        with pytest.raises(InvalidParameter, match="deadline"):
            await engine.submit(["c"], deadline=0)
        assert engine.stats().requests_finished["error"] == 2


async def test_closing_the_engine_ends_what_runs() -> None:
    async with opened() as (engine, _):
        handle = await engine.submit(["a"], SamplingParams(max_tokens=200, ignore_eos=True))
        await engine._close()
        with pytest.raises(EngineClosed):
            await handle.completions()
        with pytest.raises(EngineClosed):
            await engine.generate("b")
    assert engine.health().status == "closed"


# --- refusals -------------------------------------------------------------------------


async def test_bad_requests_are_refused_before_they_run() -> None:
    async with opened() as (engine, plugin):
        cases = [
            ("", SamplingParams(), InvalidParameter, "at least 1"),
            ([257], SamplingParams(), InvalidParameter, "vocabulary has 257"),
            ([-1], SamplingParams(), InvalidParameter, "-1"),
            ([2**40], SamplingParams(), InvalidParameter, str(2**40)),
            ([True], SamplingParams(), InvalidParameter, "prompt is True"),
            ([1.5], SamplingParams(), InvalidParameter, "prompt is 1.5"),
            ("x" * 256, SamplingParams(), ContextLengthExceeded, "has 256 tokens and at most 256"),
            ("x" * 250, SamplingParams(max_tokens=100), ContextLengthExceeded, "lower max_tokens to 6"),
            ("x", SamplingParams(logit_bias={257: 1.0}), InvalidParameter, "logit_bias is 257"),
            ("x", SamplingParams(stop_token_ids=[999]), InvalidParameter, "stop_token_ids is 999"),
            ("x" * 254, SamplingParams(min_tokens=9), InvalidParameter, "min_tokens is 9"),
            ("x", SamplingParams(extra={"nope": {}}), UnsupportedParameter, "nope"),
            ("x", SamplingParams(constraint="json"), UnsupportedParameter, "constraint"),
        ]
        for prompt, params, error, text in cases:
            with pytest.raises(error, match=text):
                await engine.generate(prompt, params)
        with pytest.raises(UnsupportedParameter, match="adapter"):
            await engine.generate("x", adapter="a")
        with pytest.raises(InvalidParameter):
            await engine.submit(["fine", ""])
        assert not plugin.made[0].plans, "something ran"
        full = await engine.generate("x" * 255, SamplingParams(max_tokens=1))
        assert full.finish_reason in ("length", "stop")


NO_PROMPTS = [5, None, 3.5, b"abc", memoryview(b"abc"), {"role": "user"}, {1, 2}, np.ones((2, 2), int)]
SAME_IDS = [np.array([1, 2, 3]), [np.int32(1), np.int64(2), 3], (1, 2, 3), range(1, 4)]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=lambda prompt: type(prompt).__name__)
async def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    async with opened() as (engine, _):
        for prompts in ([prompt], ["fine", prompt]):
            with pytest.raises(InvalidParameter, match="a text, a list of token ids, or a list of chat messages"):
                await engine.submit(prompts)
        with pytest.raises(InvalidParameter, match="a list of prompts, at least one"):
            await engine.submit(prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("deadline", value) for value in (0, -1, math.nan, "1", True, [])),
        *(("client", value) for value in (5, [], b"c")),
        *(("request_id", value) for value in (5, [], b"r")),
        *(("priority", value) for value in (2**31, 0.5, True, "1")),
        *(("cache_salt", value) for value in ("", 5, "x" * 1025)),
        *(("params", value) for value in ({"max_tokens": 1}, 5, "greedy")),
    ],
)
async def test_what_goes_with_a_request_is_checked(name: str, value: Any) -> None:
    async with opened() as (engine, plugin):
        with pytest.raises(InvalidParameter, match=f"{name} is"):
            await engine.submit(["a"], **{name: value})
        assert not plugin.made[0].plans, "something ran"


@pytest.mark.parametrize("prompt", SAME_IDS, ids=repr)
async def test_ids_may_come_in_arrays(prompt: Any) -> None:
    async with opened() as (engine, _):
        answer = await engine.generate(prompt, SamplingParams(max_tokens=1))
        assert answer.prompt_token_ids == [1, 2, 3] and all(type(i) is int for i in answer.prompt_token_ids)


@pytest.mark.parametrize(("most", "max_tokens", "kept"), [(5, 4, 5), (-1, 6, 250), (-1, None, 255), (300, 6, 256)])
async def test_a_prompt_is_cut_only_where_that_was_asked_for(most: int, max_tokens: int | None, kept: int) -> None:
    prompt = [i % 200 for i in range(300 if kept < 256 else 250)]
    async with opened() as (engine, _):
        params = slotline.SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=most)
        done = await engine.generate(prompt, params)
        assert done.prompt_token_ids == prompt[-kept:] and done.usage.prompt_tokens == len(done.prompt_token_ids)
        assert [notice.code for notice in done.warnings] == ["prompt_truncated"] * (len(prompt) > kept)
        with pytest.raises(ContextLengthExceeded):
            await engine.generate([1] * 300, slotline.SamplingParams(max_tokens=1))


async def test_long_texts_are_encoded_and_decoded_off_the_loop(no_blocking: object) -> None:
    async with opened() as (engine, _):
        for text in ("short", "long " * 2000):
            ids = await engine.tokenize(text)
            assert ids == engine.encode(text) and await engine.detokenize(ids) == text
        with pytest.raises(InvalidParameter, match="tokens has token id 999999"):
            await engine.detokenize([1, 999999])


@pytest.mark.parametrize(
    "place",
    [{"priority": 2**31}, {"priority": -(2**70)}, {"priority": True}, {"cache_salt": ""}, {"cache_salt": "x" * 1025}],
    ids=repr,
)
async def test_a_place_that_is_out_of_range_is_refused_and_ends_nothing(place: dict[str, object]) -> None:
    async with opened() as (engine, _):
        with pytest.raises(InvalidParameter) as caught:
            await engine.generate("abc", **place)
        assert caught.value.param == next(iter(place))
        for priority in (-(2**31), 2**31 - 1):
            assert (await engine.generate("abc", priority=priority)).finish_reason is not None


async def test_a_request_beyond_the_kv_pool_is_refused_at_intake() -> None:
    async with opened(kv_cache_tokens=64) as (engine, _):
        assert engine.max_model_len == 64
        with pytest.raises(ContextLengthExceeded, match="at most 64"):
            await engine.generate("x" * 64)
        done = await engine.generate("x" * 10, SamplingParams(ignore_eos=True))
        assert len(done.token_ids) == 54


async def test_the_queue_is_bounded_and_a_refusal_leaves_no_trace() -> None:
    async with opened(max_slots=1, max_queue=3, max_queue_per_client=2, max_queued_tokens=50) as (engine, _):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        running = await engine.submit(["a"], params)
        await until(lambda: engine.stats().running)
        await engine.submit(["b" * 40], params, client="me")
        with pytest.raises(QueueFull, match="max_queued_tokens"):
            await engine.submit(["c" * 20], params)
        with pytest.raises(ClientLimitExceeded, match="'me'") as caught:
            await engine.submit(["d", "e"], params, client="me")
        assert caught.value.retry_after > 0
        with pytest.raises(QueueFull, match="the limit is 4"):
            await engine.submit(["f"], SamplingParams(max_tokens=5, n=3))
        assert engine.stats().waiting == 1
        for handle in list(engine._handles.values()):
            handle.abort()
        assert running.finished


async def test_what_the_backend_lacks_is_warned_of_or_refused() -> None:
    class Bare(SimBackend):
        @property
        def capabilities(self):
            return slotline.Capabilities(block_sizes=(4,))

    async with opened(Bare, depth=1) as (engine, _):
        done = await engine.generate("x", SamplingParams(max_tokens=2, temperature=0.5, logprobs=3, prompt_logprobs=0))
        assert sorted((w.code, w.param) for w in done.warnings) == [
            ("logprobs_unsupported", "logprobs"),
            ("prompt_logprobs_unsupported", "prompt_logprobs"),
            ("temperature_unsupported", "temperature"),
        ]
        assert done.logprobs is None and done.prompt_logprobs is None
        for name, value in {
            "stop_token_ids": [1],
            "min_tokens": 1,
            "logit_bias": {1: 1.0},
            "bad_words": ["a"],
            "allowed_token_ids": [1],
            "ignore_eos": True,
        }.items():
            with pytest.raises(UnsupportedParameter, match=name):
                await engine.generate("x", SamplingParams(**{name: value}))
        with pytest.raises(UnsupportedParameter, match="score"):
            await engine.score(["x"])


async def test_options_the_backend_lacks_are_refused_at_open() -> None:
    for options, text in (
        ({"block_size": 5}, "block_size is 5"),
        ({"pipeline_depth": 2}, "up to 1"),
        ({"quantization": "int3"}, "int3"),
    ):
        with pytest.raises(ConfigError, match=text):
            async with opened(depth=1, **options):
                pass


# --- failure --------------------------------------------------------------------------


class Failing(SimBackend):
    """Raises at the steps it is told to; steps are counted over restarts."""

    def __init__(self, fail_at: set[int], counter: list[int], events: list[str] | None = None) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.counter = counter
        self.events = [] if events is None else events

    def load(self, config, model):
        self.events.append("load")
        return super().load(config, model)

    def close(self):
        self.events.append("close")
        super().close()

    def launch(self, plan):
        self.counter[0] += 1
        if self.counter[0] in self.fail_at:
            raise RuntimeError("injected")
        return super().launch(plan)


@both_depths
async def test_a_step_that_raises_fails_its_requests_and_nobody_else(depth: int) -> None:
    counter, events = [0], list[str]()
    async with opened(lambda: Failing({5}, counter, events), depth=depth, max_slots=2) as (engine, plugin):
        params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]
        handles = [await engine.submit([f"p{i}"], p) for i, p in enumerate(params)]
        results = await asyncio.gather(*(h.completions() for h in handles), return_exceptions=True)
        assert [type(r) for r in results[:2]] == [StepFailed, StepFailed]
        assert "injected" in str(results[0])
        for i in (2, 3):
            assert results[i][0].token_ids == answer(f"p{i}", i, 20, ())
        assert engine.stats().restarts == 1 and len(plugin.made) == 2 and engine.health().ok
    assert events == ["load", "close", "load", "close"], "a new backend may need the memory of the old one"


def test_causes_that_go_round_are_followed_once() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    try:
        raise first
    except ValueError:
        held = [1]
        _forget_frames(first)
    assert held == [1], "what still runs keeps its frame"


async def test_two_failures_in_a_row_end_the_engine() -> None:
    counter = [0]
    async with opened(lambda: Failing({3, 4}, counter), max_slots=1) as (engine, _):
        handles = [await engine.submit([f"p{i}"], SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(3)]
        results = await asyncio.gather(*(h.completions() for h in handles), return_exceptions=True)
        assert [type(r) for r in results] == [StepFailed, StepFailed, EngineUnhealthy]
        assert engine.health().status == "unhealthy"
        with pytest.raises(EngineUnhealthy):
            await engine.generate("x")


@both_depths
async def test_a_crowd_does_not_keep_the_first_step_waiting(depth: int) -> None:
    """The first of them are under way before the last are in."""
    params = SamplingParams(max_tokens=3, seed=5, ignore_eos=True)
    async with opened(SimBackend, depth=depth, max_slots=4, max_batch_tokens=8, max_queue=200) as (engine, _):
        before = [await engine.submit([f"p{i}"], params) for i in range(TURN)]
        assert engine.stats().steps == 0, "as many as go at a time are in before anything else has its turn"
        handles = before + [await engine.submit([f"p{i}"], params) for i in range(TURN, 3 * TURN)]
        assert engine.stats().steps > 0
        done = [(await handle.completions())[0].token_ids for handle in handles]
        assert done == [answer(f"p{i}", 5, 3, ()) for i in range(3 * TURN)]


async def test_a_step_that_cannot_be_planned_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimBackend) as (engine, _):

        def fail() -> None:
            raise AssertionError("no plan")

        monkeypatch.setattr(engine._client.core.scheduler, "schedule", fail)
        handle = await engine.submit(["a prompt"])
        with pytest.raises(EngineUnhealthy, match="no plan"):
            await handle.completions()
        assert not engine.health().ok


async def test_books_that_do_not_balance_end_the_engine_once_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotline.loop, "QUIET", 0.01)
    async with opened(SimBackend) as (engine, _):
        core = engine._client.core
        looked = asyncio.Event()
        check = core.scheduler.check_integrity

        def fail() -> None:
            looked.set()
            check()
            raise AssertionError("a block is lost")

        monkeypatch.setattr(core.scheduler, "check_integrity", fail)
        await engine.generate("x", SamplingParams(max_tokens=2))
        assert not looked.is_set(), "the answer waited for the check"
        await asyncio.wait_for(looked.wait(), 10)
        with pytest.raises(EngineUnhealthy, match="a block is lost"):
            await engine.generate("x")
        monkeypatch.undo()


@both_depths
async def test_a_row_without_finite_logits_fails_alone(depth: int) -> None:
    bad, good = "nan", "fine"
    nan_token = answer(bad, 1, 6, ())[5]
    expected = answer(good, 2, 20, ())
    assert nan_token not in expected and nan_token not in answer(bad, 1, 5, ())
    async with opened(lambda: SimBackend(nan_tokens=frozenset({nan_token})), depth=depth) as (engine, _):
        failing, fine = await asyncio.gather(
            engine.generate(bad, SamplingParams(seed=1, max_tokens=20, ignore_eos=True)),
            engine.generate(good, SamplingParams(seed=2, max_tokens=20, ignore_eos=True)),
            return_exceptions=True,
        )
        assert isinstance(failing, NumericalError)
        assert fine.token_ids == expected
        assert engine.stats().restarts == 0


async def test_a_backend_that_cannot_load_says_so_and_leaves_no_thread() -> None:
    import threading

    class Broken(SimBackend):
        def load(self, config, model):
            raise ConfigError("too small")

    with pytest.raises(ConfigError, match="too small"):
        async with opened(Broken):
            pass
    for _ in range(1000):
        if not any(t.name.startswith("slotline-backend") for t in threading.enumerate()):
            break
        await asyncio.sleep(0)


# --- memory pressure ------------------------------------------------------------------


@both_depths
async def test_preempted_requests_answer_as_if_alone(depth: int) -> None:
    async with opened(depth=depth, kv_cache_tokens=160, max_slots=8, block_size=4) as (engine, _):
        prompts = [f"request {i:02d} " for i in range(12)]
        done = await asyncio.gather(
            *(engine.generate(p, SamplingParams(seed=i, max_tokens=50, ignore_eos=True)) for i, p in enumerate(prompts))
        )
        assert engine.stats().preemptions > 0
        for i, completion in enumerate(done):
            assert completion.token_ids == answer(prompts[i], i, 50, ())


async def test_a_second_request_starts_from_the_cached_prefix() -> None:
    async with opened(block_size=4) as (engine, plugin):
        prompt = "a shared beginning of some length"
        first = await engine.generate(prompt, SamplingParams(seed=1, max_tokens=8, ignore_eos=True))
        second = await engine.generate(prompt, SamplingParams(seed=1, max_tokens=8, ignore_eos=True))
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == 32
        assert second.token_ids == first.token_ids
        other = await engine.generate(prompt, SamplingParams(seed=1, max_tokens=8), cache_salt="other")
        assert other.usage.cached_tokens == 0
        assert plugin.made[0].plans[8].start.tolist() == [32]


@both_depths
async def test_the_prompt_of_several_choices_is_computed_once(depth: int) -> None:
    async with opened(depth=depth, block_size=4) as (engine, _):
        prompt = "thirty-two characters in a prompt"
        params = SamplingParams(n=4, seed=3, max_tokens=5, ignore_eos=True)
        done = await engine.generate(prompt, params)
        assert [c.token_ids for c in done.choices] == [answer(prompt, s, 5, ()) for s in choice_seeds(3, 4)]
        assert done.usage.prompt_tokens == 33 and done.usage.cached_tokens == 0
        # The first computes 33 positions, each other one the last of them; then 4 tokens each.
        assert engine.stats().scheduled_tokens == 33 + 3 + 4 * 4


def choice_seeds(seed: int, n: int) -> list[int]:
    return [choice_seed(seed, j) for j in range(n)]


# --- observation ----------------------------------------------------------------------


async def test_hook_slotline_observe_request() -> None:
    async with opened() as (engine, plugin):
        await engine.generate("seen", SamplingParams(max_tokens=3, ignore_eos=True), request_id="r", client="c")
        kinds = [(e.kind, e.request_id, e.client, e.completion_tokens) for e in plugin.events]
        assert kinds == [("admitted", "r", "c", 0), ("first_token", "r", "c", 1), ("finished", "r", "c", 3)]
        assert plugin.events[-1].finish_reason == "length" and plugin.events[-1].prompt_tokens == 4


async def test_statistics_reconcile() -> None:
    async with opened() as (engine, _):
        done = await asyncio.gather(*(engine.generate(f"p{i}", SamplingParams(max_tokens=7)) for i in range(10)))
        stats = engine.stats()
        tokens = sum(len(c.token_ids) for c in done)
        assert stats.completion_tokens == stats.generated_tokens == tokens
        assert stats.prompt_tokens == 20
        assert sum(stats.requests_finished.values()) == 10
        assert stats.histograms["time_to_first_token"].count == 10
        assert stats.histograms["request_completion_tokens"].total == tokens
        assert stats.total_blocks == stats.free_blocks + stats.cached_blocks


async def test_two_engines_live_in_one_process() -> None:
    async with opened() as (one, _), opened(depth=2) as (two, _):
        a, b = await asyncio.gather(
            one.generate("x", SamplingParams(seed=1, max_tokens=9)),
            two.generate("x", SamplingParams(seed=2, max_tokens=9)),
        )
        assert (a.token_ids, b.token_ids) == (answer("x", 1, 9), answer("x", 2, 9))


async def test_what_the_host_raises_leaves_as_it_is() -> None:
    class HostError(Exception):
        pass

    with pytest.raises(HostError):
        async with opened() as (engine, _):
            await engine.submit(["x"], SamplingParams(max_tokens=100))
            raise HostError
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), opened():
            await asyncio.Event().wait()
