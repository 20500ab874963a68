"""The part of the conformance suite about schedules: an answer is its request's alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slotline.engine import Engine
from slotline.params import SamplingParams
from slotline.request import Completion
from slotline.testing.base import TEXT
from slotline.testing.engine_suite import EngineBase, in_loop


class ScheduleConformance(EngineBase):
    """Company, chunks, caches, preemption and abortion of others leave an answer as it is."""

    def prompts(self, engine: Engine, count: int, step: int = 7) -> list[list[int]]:
        """Return prompts of different lengths that begin differently."""
        ids = engine.encode(TEXT * (1 + count * step // 8))
        return [ids[n : n + 5 + n * step] for n in range(count)]

    def drawn(self, seed: int, **fields: Any) -> SamplingParams:
        """Return parameters that draw with a seed, as far as the backend can."""
        can = self.can.params
        hot = {"temperature": 1.5, "seed": seed} if {"temperature", "seed"} <= can else {}
        return self.params(**hot, **fields)

    async def alone(self, engine: Engine, prompts: list[list[int]], **fields: Any) -> list[Completion]:
        """Answer one prompt after the other."""
        return [await engine.generate(p, self.drawn(i, **fields)) for i, p in enumerate(prompts)]

    async def together(self, engine: Engine, prompts: list[list[int]], **fields: Any) -> list[Completion]:
        """Answer all prompts at once."""
        runs = (engine.generate(p, self.drawn(i, **fields)) for i, p in enumerate(prompts))
        return await asyncio.gather(*runs)

    @staticmethod
    def assert_same(one: list[Completion], other: list[Completion]) -> None:
        """Compare answers, log-probabilities too."""
        assert [done.token_ids for done in one] == [done.token_ids for done in other]
        assert [done.text for done in one] == [done.text for done in other]
        for a, b in zip(one, other, strict=True):
            if a.logprobs is not None and b.logprobs is not None:
                pairs = zip(a.logprobs.columns.values.tolist(), b.logprobs.columns.values.tolist(), strict=True)
                assert all(abs(x - y) < 1e-3 for x, y in pairs)

    @in_loop
    async def test_company_changes_nothing(self) -> None:
        """More requests than slots, so that rows change hands while others run."""
        extra = {"logprobs": 2} if self.can.logprobs else {}
        async with self.open(max_slots=3, prefix_caching=False) as engine:
            prompts = self.prompts(engine, 8)
            alone = await self.alone(engine, prompts, max_tokens=10, **extra)
            self.assert_same(alone, await self.together(engine, prompts, max_tokens=10, **extra))

    @in_loop
    async def test_equal_requests_have_equal_answers(self) -> None:
        async with self.open() as engine:
            done = await asyncio.gather(*(engine.generate(TEXT, self.drawn(3)) for _ in range(8)))
        assert len({tuple(each.token_ids) for each in done}) == 1

    @in_loop
    async def test_chunks_change_nothing(self) -> None:
        extra = {"prompt_logprobs": 1} if self.can.prompt_logprobs else {}
        answers = []
        for budget in (512, 7):
            async with self.open(max_batch_tokens=budget, prefix_caching=False) as engine:
                answers.append(await self.together(engine, self.prompts(engine, 4, step=12), **extra))
        self.assert_same(*answers)
        if extra:
            whole, chunked = ([done.prompt_logprobs for done in each] for each in answers)
            for a, b in zip(whole, chunked, strict=True):
                assert a is not None and b is not None and len(a) == len(b)
                assert b.columns.values.tolist() == pytest.approx(a.columns.values.tolist(), abs=1e-3)

    @in_loop
    async def test_a_cached_prefix_changes_nothing(self) -> None:
        async with self.open(prefix_caching=False) as engine:
            prompt = engine.encode(TEXT * 40)[: 3 * max(self.can.block_sizes[:1]) + 3]
            plain = await engine.generate(prompt, self.drawn(1))
        async with self.open(prefix_caching=True) as engine:
            first = await engine.generate(prompt, self.drawn(1))
            second = await engine.generate(prompt, self.drawn(1))
            apart = await engine.generate(prompt, self.drawn(1), cache_salt="another")
        assert plain.usage.cached_tokens == first.usage.cached_tokens == apart.usage.cached_tokens == 0
        assert second.usage.cached_tokens > 0
        self.assert_same([plain] * 3, [first, second, apart])

    @in_loop
    async def test_a_conversation_that_goes_on_reuses_its_past(self) -> None:
        size = self.can.block_sizes[0]
        async with self.open() as engine:
            prompt = engine.encode(TEXT * 40)[: 2 * size + 1]
            first = await engine.generate(prompt, self.params(max_tokens=4))
            longer = prompt + first.token_ids + prompt[:5]
            second = await engine.generate(longer, self.params())
        async with self.open(prefix_caching=False) as engine:
            fresh = await engine.generate(longer, self.params())
        assert second.usage.cached_tokens >= 2 * size
        assert second.token_ids == fresh.token_ids

    @in_loop
    async def test_preemption_changes_nothing(self) -> None:
        """The cache holds two of four answers, so rows give way and are computed again."""
        self.needs("ignore_eos")
        size = self.can.block_sizes[0]
        length = {"max_tokens": 3 * size}
        extra = {"logprobs": 1} if self.can.logprobs else {}
        async with self.open(prefix_caching=False) as engine:
            prompts = [prompt[: size // 2] for prompt in self.prompts(engine, 4)]
            roomy = await self.together(engine, prompts, **length, **extra)
            assert engine.stats().preemptions == 0
        async with self.open(prefix_caching=False, kv_cache_tokens=8 * size, max_model_len=4 * size) as engine:
            tight = await self.together(engine, prompts, **length, **extra)
            assert engine.stats().preemptions > 0
        self.assert_same(roomy, tight)

    @in_loop
    async def test_both_pipeline_depths_answer_alike(self) -> None:
        if self.can.pipeline_depth < 2:
            pytest.skip("pipeline_depth is 1")
        answers = []
        for depth in (1, 2):
            async with self.open(pipeline_depth=depth, max_slots=3) as engine:
                answers.append(await self.together(engine, self.prompts(engine, 8)))
        self.assert_same(*answers)

    @in_loop
    async def test_engines_do_not_disturb_each_other(self) -> None:
        async with self.open() as one, self.open() as other:
            prompts = self.prompts(one, 3)
            both = await asyncio.gather(self.together(one, prompts), self.together(other, prompts))
            self.assert_same(*both)
            self.assert_same(both[0], await self.alone(one, prompts))

    # --- requests that end early ------------------------------------------------------

    @staticmethod
    async def assert_idle(engine: Engine) -> None:
        """Check that nothing runs, and that nothing is held once the steps in flight are over."""
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        async with asyncio.timeout(10):
            while engine.stats().active_blocks:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0.001)
        engine.check_integrity()

    @in_loop
    async def test_leaving_a_stream_gives_everything_back(self) -> None:
        async with self.open() as engine:
            stream = engine.stream(TEXT, self.params(max_tokens=200))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator has it
            await self.assert_idle(engine)

    @in_loop
    async def test_cancelling_gives_everything_back(self) -> None:
        async with self.open(max_slots=2) as engine:
            runs = [asyncio.ensure_future(engine.generate(TEXT, self.params(max_tokens=200))) for _ in range(5)]
            while not engine.stats().running:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)
            for run in runs:
                run.cancel()
            await asyncio.wait(runs)
            assert all(run.cancelled() for run in runs)
            await self.assert_idle(engine)

    @in_loop
    async def test_aborting_some_leaves_the_others_alone(self) -> None:
        async with self.open(max_slots=3, prefix_caching=False) as engine:
            prompts = self.prompts(engine, 6)
            alone = await self.alone(engine, prompts)
            handles = [await engine.submit([p], self.drawn(i)) for i, p in enumerate(prompts)]
            for handle in handles[::3]:
                engine.abort(handle.request_id)
                engine.abort(handle.request_id)
            kept = [(await handle.completions())[0] for i, handle in enumerate(handles) if i % 3]
            self.assert_same([done for i, done in enumerate(alone) if i % 3], kept)
            await self.assert_idle(engine)
