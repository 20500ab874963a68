"""An engine whose core is on the far end of a socket: the same answers, and what happens when an end goes away."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slotline
from slotline import errors
from slotline.errors import (
    ClientLimitExceeded,
    EngineLost,
    EngineUnhealthy,
    InvalidParameter,
    QueueFull,
    SlotlineError,
    StepFailed,
)
from slotline.hosting import hosting
from slotline.outputs import OutputBatch
from slotline.plan import LogprobColumns
from slotline.plugins.echo import EchoBackend
from slotline.request import SequenceRequest
from slotline.wire import (
    Report,
    frame,
    pack_batch,
    pack_error,
    pack_submit,
    to_client,
    to_engine,
    unpack_batch,
    unpack_error,
    unpack_submit,
)

CONFIG = slotline.EngineConfig(model="echo", backend="echo", max_slots=4, max_queue=8, max_queue_per_client=6)
LONG = slotline.SamplingParams(max_tokens=10_000, ignore_eos=True)


class Host:
    """A socket, and the engines that come and go behind it."""

    def __init__(self, folder: str) -> None:
        self.path = str(Path(folder) / "engine")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()

    @asynccontextmanager
    async def running(self, **options) -> AsyncIterator:
        async with hosting(CONFIG.with_options(**options), self.listener.dup()) as core:
            yield core

    def connect(self, **options):
        return slotline.Engine.connect(self.path, CONFIG.with_options(**options))


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for a socket
        host = Host(folder)
        with host.listener:
            yield host


async def idle(core) -> None:
    """Wait until nothing is left in a core; the test's own time limit ends it otherwise."""
    while not core.scheduler.idle:  # it is asked, it does not call
        await asyncio.sleep(0)
    core.scheduler.check_integrity()
    assert core.stats().active_blocks == 0


async def test_answers_are_those_of_an_engine_in_this_process(host):
    prompts = [f"prompt {i}, and so on" for i in range(8)]
    params = slotline.SamplingParams(max_tokens=30, ignore_eos=True, stop=["nd so on7", "t 3"])
    async with slotline.Engine.open(config=CONFIG.with_options(max_queue_per_client=None)) as local:
        wanted = await asyncio.gather(*(local.generate(prompt, params) for prompt in prompts))
    async with host.running(max_queue_per_client=None) as core, host.connect() as engine:
        assert engine.capabilities == local.capabilities and engine.info == local.info
        assert engine.max_model_len == local.max_model_len and engine.config.backend == "echo"
        found = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        for one, other in zip(found, wanted, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        texts = [output.text async for output in engine.stream("abc", slotline.SamplingParams(max_tokens=3))]
        assert "".join(texts) == "abc"
        await idle(core)


async def test_choices_start_from_the_first_ones_blocks(host):
    prompt = "a prompt of some blocks " * 10
    async with host.running() as core, host.connect() as engine:
        done = await engine.generate(prompt, slotline.SamplingParams(max_tokens=5, n=3))
        assert [choice.text for choice in done.choices] == [prompt[:5]] * 3
        assert core.stats().prefix_hits > 0
        again = await engine.generate(prompt, slotline.SamplingParams(max_tokens=5))
        assert again.usage.cached_tokens > 0


async def test_clients_do_not_mix_and_their_counts_add_up(host):
    async with host.running(echo_delay=0.001) as core, host.connect() as one, host.connect() as two:
        params = slotline.SamplingParams(max_tokens=20, ignore_eos=True)
        asked = [(engine, f"{name}{i}") for i in range(3) for name, engine in (("a", one), ("b", two))]
        done = await asyncio.gather(*(engine.generate(prompt, params) for engine, prompt in asked))
        assert [d.text for d in done] == [(prompt * 10)[:20] for _, prompt in asked]
        for engine in (one, two):
            total = await engine.total_stats()
            assert total.requests_started == 6 and total.requests_finished["length"] == 6
            assert total.histograms["time_to_first_token"].count == 6 and total.steps == core.stats().steps
        assert one.stats().requests_started == 3


async def test_what_a_client_counted_outlives_it(host):
    async with host.running(), host.connect() as one:
        async with host.connect() as two:
            await two.generate("abc")
            await two.total_stats()
        assert (await one.total_stats()).requests_finished["stop"] == 1


async def test_caps_hold_over_all_clients(host):
    async with host.running(echo_delay=0.01) as core:
        async with host.connect() as one, host.connect() as two:
            for _ in range(6):
                await one.submit(["abc"], LONG, client="x")
            with pytest.raises(ClientLimitExceeded, match="'x'") as found:
                await two.submit(["abc"], LONG, client="x")
            assert found.value.retry_after > 0
            for _ in range(6):
                await two.submit(["abc"], LONG, client="y")
            with pytest.raises(QueueFull):
                await one.submit(["abc"], LONG)
            assert one.stats().requests_started == 6
        await idle(core)


@pytest.mark.parametrize("leave", ["abort", "stop", "hang up"])
async def test_a_client_that_leaves_takes_its_sequences_with_it(host, leave):
    async with host.running(echo_delay=0.001) as core, host.connect() as other, AsyncExitStack() as stack:
        engine = await stack.enter_async_context(host.connect())
        handles = [await engine.submit(["abc"], LONG) for _ in range(6)]
        theirs = asyncio.ensure_future(other.generate("xyz", slotline.SamplingParams(max_tokens=30, ignore_eos=True)))
        await anext(aiter(handles[0]))
        if leave == "hang up":
            await stack.aclose()
        for handle in handles:
            handle.abort()
        assert (await theirs).text == "xyz" * 10
        await idle(core)


async def test_deadlines_and_errors_reach_the_client(host, monkeypatch):
    async with host.running(echo_delay=0.01), host.connect() as engine:
        with pytest.raises(errors.DeadlineExceeded):
            await engine.generate("abc", LONG, deadline=0.05)
        monkeypatch.setattr(EchoBackend, "_next", lambda *_: 1 / 0)
        with pytest.raises(StepFailed, match="ZeroDivisionError"):
            await engine.generate("abc")
        monkeypatch.undo()
        assert (await engine.generate("abc")).text == "abc"


async def test_a_submission_that_is_given_up_leaves_nothing(host):
    async with host.running(echo_delay=0.01) as core, host.connect() as engine:
        task = asyncio.ensure_future(engine.submit(["abc"], LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.generate("xyz")).text == "xyz"  # in order behind what was given up
        await idle(core)


async def test_an_engine_that_ends_fails_its_requests_and_the_next_one_is_used(host):
    over, opened = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with host.running(echo_delay=0.001):
            opened.set()
            await over.wait()

    process = asyncio.ensure_future(first())
    async with host.connect() as engine:
        handles = [await engine.submit(["abc"], LONG) for _ in range(6)]
        await anext(aiter(handles[0]))
        engine._client._writer.transport.abort()  # what the death of a process does to its sockets
        for result in await asyncio.gather(*(h.completions() for h in handles[1:]), return_exceptions=True):
            assert isinstance(result, EngineLost)
        over.set()
        await process
        while engine.health().ok:  # until the client sees that its next connection ended, too
            await asyncio.sleep(0)
        assert engine.health().status == "loading" and engine.stats().requests_finished["error"] >= 5
        with pytest.raises(EngineLost):
            await engine.generate("abc")
        async with host.running() as core:
            while not engine.health().ok:
                await asyncio.sleep(0)
            assert (await engine.generate("abc")).text == "abc"
            await idle(core)


async def test_an_engine_of_another_version_is_refused(host, monkeypatch):
    from slotline import hosting as module

    monkeypatch.setattr(module.slotline, "__version__", "0.0.0")
    async with host.running():
        monkeypatch.undo()
        with pytest.raises(EngineUnhealthy, match=r"version 0\.0\.0"):
            async with host.connect():
                pass


async def test_an_engine_that_says_nothing_is_wedged(host, monkeypatch):
    from slotline import remote

    async with host.running(), host.connect() as engine:
        monkeypatch.setattr(remote, "SILENT_AFTER", 0)
        assert engine.health().status == "wedged"
        with pytest.raises(EngineLost, match="does not respond"):
            await engine.generate("abc")
        monkeypatch.undo()
        assert (await engine.generate("abc")).text == "abc"


async def test_a_client_that_reads_nothing_is_hung_up_on(host, monkeypatch):
    from slotline import hosting as module

    monkeypatch.setattr(module, "MAX_UNREAD", 1000)
    async with host.running() as core, host.connect() as engine:
        reader, writer = await asyncio.open_unix_connection(host.path, limit=100)  # reads a little, then no more
        sequence = SequenceRequest(1, np.arange(97, 100, dtype=np.int32), LONG, 0, (), 20_000)
        writer.write(pack_submit(1, [sequence]))
        while core.stats().generated_tokens == 0:
            await asyncio.sleep(0)
        await idle(core)  # long before all of its tokens
        assert core.stats().generated_tokens < 20_000
        writer.close()
        reader.feed_eof()
        assert (await engine.generate("abc")).text == "abc"


@pytest.mark.parametrize("junk", [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\x91\x09", b"\x00"])
async def test_what_is_no_message_ends_the_connection_alone(host, junk, caplog):
    async with host.running(), host.connect() as engine:
        reader, writer = await asyncio.open_unix_connection(host.path)
        writer.write(junk)
        writer.write_eof()
        await reader.read()  # the greeting, then the end
        writer.close()
        assert (await engine.generate("abc")).text == "abc"
    assert "EngineUnhealthy" not in caplog.text


# The messages themselves


def test_a_submission_comes_out_as_it_went_in():
    params = slotline.SamplingParams(
        temperature=0.5, logit_bias={3: 1.5}, stop=["x"], extra={"p": {"a": [1, None]}}, bad_words=["no"]
    )
    sequence = SequenceRequest(
        seq_id=2**40, token_ids=np.arange(5, dtype=np.int32), params=params, seed=2**64 - 1, stop_ids=(1, 2),
        max_tokens=9, bad_words=((1, 2), (3,)), priority=-1, client="c", deadline=1.5, cache_salt="s", logprobs=0,
        prompt_logprobs=3, leader=7, embed=True,
    )  # fmt: skip
    message = to_engine.decode(pack_submit(1, [sequence, replace(sequence, seq_id=3)])[4:])
    assert len(message.params) == 1
    for made, wanted in zip(unpack_submit(message), (sequence, replace(sequence, seq_id=3)), strict=True):
        for field in fields(SequenceRequest):
            if field.name == "token_ids":
                assert made.token_ids.tolist() == wanted.token_ids.tolist() and made.token_ids.dtype == np.int32
            else:
                assert getattr(made, field.name) == getattr(wanted, field.name), field.name


def test_options_that_are_no_plain_data_are_refused():
    params = slotline.SamplingParams(extra={"p": object()})
    sequence = SequenceRequest(1, np.ones(1, np.int32), params, 0, (), 1)
    with pytest.raises(InvalidParameter, match="extra"):
        pack_submit(1, [sequence])


@pytest.mark.parametrize(
    "name", sorted(n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, SlotlineError))
)
def test_errors_keep_their_class(name):
    error = getattr(errors, name)("what happened")
    if hasattr(error, "param"):
        error.param = "field"
    if hasattr(error, "retry_after"):
        error.retry_after = 7.0
    again = unpack_error(pack_error(error))
    assert type(again) is type(error) and again.message == "what happened" and again.__dict__ == error.__dict__


def test_an_error_that_this_side_does_not_know_is_the_engines():
    assert type(unpack_error(msgspec.structs.replace(pack_error(StepFailed("x")), name="os"))) is errors.EngineError


@st.composite
def batches(draw) -> OutputBatch:
    size = draw(st.integers(0, 4))
    counts = np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), np.int32)
    widths = np.array(draw(st.lists(st.integers(0, 3), min_size=int(counts.sum()), max_size=int(counts.sum()))), int)
    total = int(widths.sum())
    columns = LogprobColumns(
        np.concatenate([[0], np.cumsum(widths)]).astype(np.int32),
        np.arange(total, dtype=np.int32),
        -np.arange(total, dtype=np.float32),
        np.arange(total, dtype=np.int32),
    )
    return OutputBatch(
        draw(st.integers(0, 2**40)),
        np.array(draw(st.lists(st.integers(0, 2**62), min_size=size, max_size=size)), np.int64),
        np.arange(size, dtype=np.int32).reshape(size, 1),
        counts,
        np.zeros(size, np.int32),
        logprobs=columns if draw(st.booleans()) else None,
        prompt_counts=counts if draw(st.booleans()) else None,
        prompt_logprobs=columns,
        admitted=((3, 4),),
        errors=((5, QueueFull("full", retry_after=2.0)),),
        device_ms=1.5,
        embeddings=((7, np.arange(3, dtype=np.float32)),),
    )


@given(batches(), st.data())
def test_news_come_out_as_they_went_in(batch, data):
    same = unpack_batch(to_client.decode(frame(pack_batch(batch))[4:]))
    assert_equal(same, batch)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(batch.seq_ids), max_size=len(batch.seq_ids))), bool)
    assert_equal(same.select(keep), batch.select(keep))


def assert_equal(one: OutputBatch, other: OutputBatch) -> None:
    for field in fields(OutputBatch):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, LogprobColumns):
            left, right = ([getattr(c, f.name).tolist() for f in fields(c) if f.init] for c in (left, right))
        elif isinstance(left, np.ndarray):
            left, right = left.tolist(), right.tolist()
        elif field.name == "errors":
            left, right = ([(i, type(e), e.args, e.__dict__) for i, e in errors] for errors in (left, right))
        elif field.name == "embeddings":
            left, right = ([(i, v.dtype, v.tolist()) for i, v in vectors] for vectors in (left, right))
        assert left == right, field.name


def test_counts_cross_as_they_are():
    stats = slotline.stats.RequestStats()
    stats.started(5)
    stats.ended("stop", 3, 0.5, 0.1)
    assert to_engine.decode(frame(Report(stats.counts()))[4:]).counts == stats.counts()
