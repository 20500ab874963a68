"""The cases OV-*: more than there is room for. docs/cases.md says what each case is about."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx

import slotline
from slotline.apis.openai import create_app


@asynccontextmanager
async def served(**options):
    """Call an engine that answers one token a millisecond."""
    config = slotline.EngineConfig(model="echo", backend="echo", echo_delay=0.001, **options)
    async with slotline.Engine.open(config=config) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

            async def ask(**body):
                body = {"model": "echo", "prompt": "abc", "max_tokens": 40, "ignore_eos": True, **body}
                return await client.post("/v1/completions", json=body)

            yield engine, ask


def assert_idle(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.active_blocks) == (0, 0, 0)


async def test_ov_01_one_more_than_the_line_holds_is_told_to_come_again():
    async with served(max_slots=1, max_queue=4) as (engine, ask):
        replies = await asyncio.gather(*(ask() for _ in range(20)))
        refused = [reply for reply in replies if reply.status_code != 200]
        assert len(refused) == 15 and {reply.status_code for reply in refused} == {503}
        for reply in refused:
            assert int(reply.headers["retry-after"]) >= 1 and reply.json()["error"]["type"] == "overloaded_error"
        for reply in replies:
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == ("abc" * 14)[:40]
        assert_idle(engine)


async def test_ov_01_choices_and_prompts_count_each():
    async with served(max_slots=1, max_queue=4) as (engine, ask):
        assert (await ask(n=5)).status_code == 200 and (await ask(prompt=["a"] * 5)).status_code == 200
        for body, param in (
            ({"n": 6}, "n"),
            ({"prompt": ["a"] * 6}, "prompt"),
            ({"prompt": ["a"] * 3, "n": 2}, "prompt"),
        ):
            reply = await ask(**body)  # never, however long it waited
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        replies = await asyncio.gather(ask(), ask(prompt=["a"] * 5))
        assert sorted(reply.status_code for reply in replies) == [200, 503]
        assert_idle(engine)


async def test_ov_02_every_request_gets_an_answer_or_a_refusal():
    async with served(max_slots=4, max_queue=16) as (engine, ask):

        async def caller(count):
            return [(await ask(max_tokens=4)).status_code for _ in range(count)]

        found = await asyncio.gather(*(caller(10) for _ in range(50)))
        statuses = [status for row in found for status in row]
        assert len(statuses) == 500 and set(statuses) == {200, 503}
        assert statuses.count(200) >= 20
        assert_idle(engine)


async def test_sc_03_a_long_prompt_does_not_stop_who_is_answering():
    async with served(max_slots=2, max_queue=4, max_batch_tokens=64, kv_cache_tokens=8192) as (engine, ask):
        params = slotline.SamplingParams(max_tokens=2000, ignore_eos=True)
        handle = await engine.submit(["abc"], params)
        pieces = handle.pieces()
        await anext(pieces)
        steps, tokens = engine.stats().steps, handle.usage.completion_tokens
        assert (await ask(prompt="x" * 1000, max_tokens=1)).status_code == 200
        steps, tokens = engine.stats().steps - steps, handle.usage.completion_tokens - tokens
        assert steps >= 1000 // 64 and tokens >= steps - 2  # one a step, but for those that are in flight
        await pieces.aclose()
        await asyncio.sleep(0.1)  # pages of a step in flight are free when it has come back
        assert_idle(engine)
