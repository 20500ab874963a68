"""The echo backend's pace: steps that all rows share, or a rate that each row keeps for itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

import slotline
from slotline.config import EngineConfig
from slotline.plan import Status
from slotline.plugins import echo
from slotline.testing import StepDriver, Work


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def driver_of(**options: float) -> StepDriver:
    config = EngineConfig.of("echo", backend="echo", max_slots=4, **options)
    backend = echo.EchoBackend()
    return StepDriver(backend, backend.load(config, echo.open_model(config)))


@contextlib.contextmanager
def stopped() -> Iterator[Clock]:
    """Give the backend a clock of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(echo, "time", clock)
        yield clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    with stopped() as clock:
        yield clock


def tokens_of(driver: StepDriver, *rows: int) -> list[int]:
    """Run a step and return the rows that have a token."""
    result = driver.step(*(Work(row, 1) for row in rows))
    assert set(result.status.tolist()) <= {Status.OK, Status.WAIT}
    return result.rows[result.n_tokens > 0].tolist()


def test_a_row_that_begins_waits_for_nobody(clock: Clock) -> None:
    driver = driver_of(echo_rate=100)
    began = clock.now
    driver.admit(0, [7], max_tokens=100)
    assert tokens_of(driver, 0) == [0] and clock.now == began
    assert tokens_of(driver, 0) == [] and clock.now == pytest.approx(began + echo.TICK)
    driver.admit(1, [8], max_tokens=100)
    assert tokens_of(driver, 0, 1) == [1] and clock.now == pytest.approx(began + echo.TICK)


@given(rate=st.floats(20, 5000), waits=st.lists(st.floats(0, 0.02), min_size=1, max_size=40))
def test_no_row_is_ahead_of_its_rate(rate: float, waits: list[float]) -> None:
    """However long the engine takes between steps, which end within a tick."""
    with stopped() as clock:
        keep_pace(clock, rate, waits)


def keep_pace(clock: Clock, rate: float, waits: list[float]) -> None:
    driver = driver_of(echo_rate=rate)
    began, count = {}, {0: 0, 1: 0}
    for step, wait in enumerate(waits):
        if step in (0, 3):
            row = step // 3
            driver.admit(row, [7], max_tokens=100)
            began[row] = clock.now
        before = clock.now
        had = tokens_of(driver, *began)
        for row, since in began.items():
            count[row] += row in had
            assert count[row] <= 1 + (clock.now - since) * rate + 1e-6
        assert clock.now - before <= echo.TICK + 1e-9
        clock.sleep(wait)


def test_a_fast_rate_is_reached(clock: Clock) -> None:
    driver = driver_of(echo_rate=250)
    driver.admit(0, [7], max_tokens=1000)
    began, count = clock.now, 0
    while clock.now < began + 1:
        count += len(tokens_of(driver, 0))
    assert count in (250, 251)


@pytest.mark.parametrize("depth", [1, 2])
async def test_rows_that_wait_answer_as_others_do(depth: int) -> None:
    prompts = ["one prompt", "another", "and a third"]
    params = slotline.SamplingParams(max_tokens=25, ignore_eos=True)
    answers = []
    for rate in (0, 700):
        options = {"backend": "echo", "max_slots": 2, "pipeline_depth": depth, "echo_rate": rate}
        async with slotline.Engine.open("echo", **options) as engine:
            began = time.monotonic()
            handle = await engine.submit(prompts, params)
            answers.append([done.token_ids for done in await handle.completions()])
            took = time.monotonic() - began
            seen = engine.stats().histograms["inter_token"]
            assert seen.count == 3 * 24 and engine.stats().generated_tokens == 75
        engine.check_integrity()
    assert answers[0] == answers[1]
    assert took > 2 * 24 / 700 and seen.total > 3 * 24 / 700 * 0.99


async def test_a_new_request_does_not_wait_for_the_pace_of_others() -> None:
    async with slotline.Engine.open("echo", backend="echo", echo_rate=0.1) as engine:
        slow = engine.stream("slow", slotline.SamplingParams(max_tokens=3))
        assert (await anext(slow)).text == "s"
        done = await engine.generate("quick", slotline.SamplingParams(max_tokens=1))
        assert done.text == "q" and engine.stats().generated_tokens == 2
        await slow.aclose()
