"""Logprobs through the engine: transformers' values, and the laws that hold for any request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import slotline
from slotline import Completion, Logprobs, SamplingParams
from slotline.errors import RequestAborted

pytest_plugins = ["slotline.testing"]

TOLERANCE = 1e-4
CONDITIONS = {
    "alone": {"max_slots": 1, "kv_cache_tokens": 2048},
    "in company": {"max_slots": 4, "kv_cache_tokens": 8192},
    "chunked": {"max_slots": 4, "kv_cache_tokens": 8192, "max_batch_tokens": 24},
    "preempted": {"max_slots": 8, "kv_cache_tokens": 512, "max_batch_tokens": 64},
}


# --- the values of transformers -------------------------------------------------------


class Reference:
    """Transformers' log-softmax of whole sequences, each computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, ids: list[int]) -> np.ndarray:
        """Return [L, V] the log-probabilities of what follows each position."""
        import torch

        if tuple(ids) not in self._seen:
            with torch.inference_mode():
                logits = self._model(torch.tensor([ids])).logits[0]
            self._seen[tuple(ids)] = logits.float().log_softmax(-1).numpy()
        return self._seen[tuple(ids)]


@pytest.fixture(scope="module")
def reference(smollm2_reference: Any) -> Reference:
    return Reference(smollm2_reference)


def check_rows(logprobs: Logprobs, tokens: list[int], expected: np.ndarray, width: int) -> None:
    """Compare every value with row i of ``expected``; the best ones are the best there."""
    assert len(logprobs) == len(tokens) == len(expected)
    for i, (token, row) in enumerate(zip(tokens, expected, strict=True)):
        entries = logprobs.entries(i)
        assert entries[0].token_id == token
        for entry in entries:
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=TOLERANCE)
        best = sorted((e.logprob for e in entries), reverse=True)[:width]
        assert best == pytest.approx(np.sort(row)[::-1][:width], abs=TOLERANCE)
        assert entries[0].rank == pytest.approx(1 + (row > row[token]).sum(), abs=2)  # near-ties may swap


@pytest.mark.timeout(900)
@pytest.mark.parametrize("condition", CONDITIONS)
async def test_raw_logprobs_are_those_of_transformers(
    condition: str, reference: Reference, mixed_prompts: list[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    async with slotline.Engine.open(threads=1, **CONDITIONS[condition]) as engine:
        done = await asyncio.gather(*(engine.generate(p, params) for p in mixed_prompts))
        assert (engine.stats().preemptions > 0) == (condition == "preempted")
    for completion in done:
        check_completion(completion, reference)


def check_completion(completion: Completion, reference: Reference) -> None:
    prompt, answer = completion.prompt_token_ids, completion.token_ids
    expected = reference(prompt + answer)
    assert len(answer) == 32 == len(completion.logprobs)
    check_rows(completion.logprobs, answer, expected[len(prompt) - 1 : -1], 3)
    assert completion.prompt_logprobs[0] is None and len(completion.prompt_logprobs) == len(prompt)
    check_rows(completion.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1], 2)


async def test_raw_logprobs_do_not_change_behind_a_cached_prefix(
    reference: Reference, mixed_prompts: list[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=3)
    async with slotline.Engine.open(threads=1, max_slots=4, kv_cache_tokens=8192) as engine:
        for prompt in mixed_prompts[-4:]:
            await engine.generate(prompt, SamplingParams(max_tokens=1))
            done = await engine.generate(prompt, params)
            assert done.usage.cached_tokens > 0
            expected = reference(done.prompt_token_ids + done.token_ids)
            check_rows(done.logprobs, done.token_ids, expected[len(done.prompt_token_ids) - 1 : -1], 3)


async def test_a_prompt_that_is_scored_is_computed_and_then_cached(mixed_prompts: list[str]) -> None:
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    async with slotline.Engine.open(threads=1, max_slots=4, kv_cache_tokens=4096) as engine:
        for _ in range(2):
            assert (await engine.generate(mixed_prompts[-1], scored)).usage.cached_tokens == 0
        assert (await engine.generate(mixed_prompts[-1], SamplingParams(max_tokens=1))).usage.cached_tokens > 0


@pytest.mark.parametrize("temperature", [0, 1])
async def test_processed_logprobs_are_of_what_is_left_to_draw_from(temperature: float) -> None:
    async with slotline.Engine.open(threads=1, max_slots=4, kv_cache_tokens=2048) as engine:
        common = {"max_tokens": 12, "seed": 3, "logprobs_mode": "processed", "logprobs": 5, "ignore_eos": True}
        one = await engine.generate("Once upon a time", SamplingParams(temperature=temperature, top_k=1, **common))
        assert [list(row.values()) for row in one.logprobs] == [[0.0]] * 12
        two = await engine.generate("Once upon a time", SamplingParams(temperature=temperature, top_k=2, **common))
        for row in two.logprobs:
            assert len(row) == 2
            assert math.fsum(map(math.exp, row.values())) == pytest.approx(1, abs=1e-5)


# --- laws for any request -------------------------------------------------------------


@pytest.fixture(scope="module")
async def engine(anyio_backend: str, tiny_llama: Path) -> AsyncIterator[slotline.Engine]:
    options = {"max_slots": 3, "kv_cache_tokens": 256, "max_batch_tokens": 16, "threads": 1, "device": "cpu"}
    async with slotline.Engine.open(str(tiny_llama), deterministic=True, dtype="float32", **options) as engine:
        yield engine


async def test_rows_that_do_not_ask_cost_nothing(engine: slotline.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.torch_backend import step

    tabulated: list[int] = []
    normalised: list[int] = []
    tabulate, log_softmax = step.tabulate, step.torch.log_softmax

    def count_tables(values: Any, *rest: Any) -> Any:
        tabulated.append(len(values))
        return tabulate(values, *rest)

    def count_rows(values: Any, *rest: Any) -> Any:
        normalised.append(len(values))
        return log_softmax(values, *rest)

    monkeypatch.setattr(step, "tabulate", count_tables)
    monkeypatch.setattr(step.torch, "log_softmax", count_rows)
    plain = SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
    await asyncio.gather(*(engine.generate("the dog", plain) for _ in range(3)))
    assert (sum(tabulated), sum(normalised)) == (0, 0)
    asked = SamplingParams(max_tokens=7, ignore_eos=True, logprobs=5)
    await asyncio.gather(*(engine.generate("the dog", params) for params in (plain, asked, plain)))
    assert (sum(tabulated), sum(normalised)) == (7, 7)


TEXTS = st.text(st.sampled_from("the dog\n é🦙<|end|>x"), min_size=1, max_size=30)
WIDTHS = st.sampled_from([None, 0, 1, 3, 20])


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], int | None]:
    """Return a prompt, the fields of its parameters, and after how many pieces its reader leaves."""
    max_tokens = draw(st.integers(0, 12))
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, min(max_tokens, 3))),
        "n": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 50)),
        "temperature": draw(st.sampled_from([0, 0.7, 1.5])),
        "top_k": draw(st.sampled_from([0, 1, 2, 40])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.3])),
        "stop": draw(st.lists(st.text(st.sampled_from("the dogé\ufffd"), min_size=1, max_size=3), max_size=2)),
        "stop_token_ids": draw(st.lists(st.integers(0, 260), max_size=3)),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "logit_bias": draw(st.dictionaries(st.integers(0, 260), st.sampled_from([-100.0, 5.0, 20.0]), max_size=3)),
        "logprobs": draw(WIDTHS),
        "prompt_logprobs": draw(WIDTHS),
        "logprobs_mode": draw(st.sampled_from(["raw", "processed"])),
    }
    return draw(TEXTS), fields, draw(st.none() | st.integers(0, 3))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(asked=st.lists(requests(), min_size=1, max_size=4))
async def test_any_mix_of_requests_keeps_the_laws(engine: slotline.Engine, asked: list[Any]) -> None:
    streamed = await asyncio.gather(*(stream(engine, *one) for one in asked))
    for (prompt, fields, leaves), got in zip(asked, streamed, strict=True):
        whole = await engine.generate(prompt, SamplingParams(**fields))
        for choice in whole.choices:
            check_laws(engine, choice, fields)
        if leaves is None:
            assert got == [summary(choice) for choice in whole.choices], "streamed and whole differ"
        if fields["logprobs"] is not None:
            other = {**fields, "logprobs": 7, "prompt_logprobs": None}
            again = await engine.generate(prompt, SamplingParams(**other))
            for a, b in zip(whole.choices, again.choices, strict=True):
                assert sampled(a.logprobs) == sampled(b.logprobs), "a sampled token's value depends on the width"
    assert engine.stats().running == engine.stats().waiting == 0
    engine.check_integrity()


async def stream(
    engine: slotline.Engine, prompt: str, fields: dict[str, Any], leaves: int | None
) -> list[tuple[Any, ...]]:
    """Read a request piece by piece; leave early where told to."""
    handle = await engine.submit([prompt], SamplingParams(**fields))
    parts: list[list[Any]] = [["", [], [], None, None, []] for _ in range(fields["n"])]
    try:
        async for count, piece in aenumerate(handle):
            assert piece.logprobs is None or len(piece.logprobs) == len(piece.token_ids)
            part = parts[piece.index]
            part[0] += piece.text
            part[1] += piece.token_ids
            part[2] += list(piece.logprobs or ())
            part[5] += list(piece.prompt_logprobs or ())
            if piece.finish_reason is not None:
                part[3:5] = piece.finish_reason, piece.stop_reason
            if count == leaves:
                handle.abort()
    except RequestAborted:
        pass
    return [tuple(part) for part in parts]


async def aenumerate(handle: Any) -> AsyncIterator[tuple[int, Any]]:
    count = 0
    async for piece in handle:
        yield count, piece
        count += 1


def summary(choice: Completion) -> tuple[Any, ...]:
    return (
        choice.text,
        choice.token_ids,
        list(choice.logprobs or ()),
        choice.finish_reason,
        choice.stop_reason,
        list(choice.prompt_logprobs or ()),
    )


def sampled(logprobs: Logprobs) -> list[tuple[int, float]]:
    return [next(iter(row.items())) for row in logprobs]


def check_laws(engine: slotline.Engine, choice: Completion, fields: dict[str, Any]) -> None:
    ids = choice.token_ids
    assert len(ids) <= fields["max_tokens"]
    if fields["logprobs"] is not None:
        assert len(choice.logprobs) == len(ids)
        check_table(choice.logprobs, ids, fields["logprobs"])
        spelt = b"".join(choice.logprobs.entries(i)[0].bytes for i in range(len(ids)))
        assert spelt == b"".join(engine.vocabulary.bytes_of(i) for i in ids)
    else:
        assert choice.logprobs is None
    if fields["prompt_logprobs"] is not None and choice.index == 0:
        assert choice.prompt_logprobs[0] is None
        assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
        check_table(choice.prompt_logprobs[1:], choice.prompt_token_ids[1:], fields["prompt_logprobs"])
    check_text(engine, choice, fields)


def check_table(logprobs: Logprobs, ids: list[int], width: int) -> None:
    for i, token in enumerate(ids):
        entries = logprobs.entries(i)
        values, ranks = [e.logprob for e in entries], [e.rank for e in entries]
        assert entries[0].token_id == token and all(math.isfinite(v) and v <= 0 for v in values)
        assert len({e.token_id for e in entries}) == len(entries) <= width + 1
        assert values[1:] == sorted(values[1:], reverse=True) and ranks[1:] == sorted(ranks[1:])
        assert all(rank <= width for rank in ranks[1:])


def check_text(engine: slotline.Engine, choice: Completion, fields: dict[str, Any]) -> None:
    """Text is what the bytes of the tokens say, cut at a stop."""
    shown = choice.token_ids
    ended_by_id = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    if ended_by_id and not fields["include_stop_str_in_output"]:
        shown = shown[:-1]
    whole = engine.decode(shown, skip_special_tokens=fields["skip_special_tokens"])
    if isinstance(choice.stop_reason, str):
        assert choice.stop_reason in fields["stop"]
        assert whole.startswith(choice.text) or "\ufffd" in whole
        assert (choice.stop_reason in choice.text) <= fields["include_stop_str_in_output"] or fields["min_tokens"]
    else:
        assert choice.text == whole
        assert fields["min_tokens"] or not any(stop in whole for stop in fields["stop"])
