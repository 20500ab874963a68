"""The part of the conformance suite that runs a backend in an engine, as applications do."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import pytest

import slotline
from slotline.backend import ALL_PARAMS, HARD_PARAMS, SOFT_PARAMS, Capabilities
from slotline.engine import Engine
from slotline.errors import ContextLengthExceeded, InvalidParameter, UnsupportedParameter
from slotline.request import Completion
from slotline.testing.base import TEXT, Conformance

P = ParamSpec("P")

# Values that differ from "not given", for asking a backend for what it did not declare.
EXAMPLES: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "seed": 7,
    "stop_token_ids": [1],
    "min_tokens": 1,
    "logit_bias": {1: 1.0},
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "ignore_eos": True,
}

TINY = 5e-324  # the least number above 0 that a double holds; others become 0 in float32
EXTREMES: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (0, TINY, 1e-40, 2)),
    *(("top_p", value) for value in (TINY, 1e-40, 1)),
    *(("top_k", value) for value in (-1, 2**31 - 1, 2**31, 2**63, 10**400)),
    *(("min_p", value) for value in (TINY, 1e-40)),
    *(("repetition_penalty", value) for value in (0.01, 10)),
    *(("presence_penalty", value) for value in (-2, 2)),
    *(("frequency_penalty", value) for value in (-2, 2)),
    *(("seed", value) for value in (-(2**63), -1, 2**63, 2**64 - 1)),
]


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test to its end; the suite needs no async pytest plugin, and minds none."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class EngineBase(Conformance):
    """How the engine tests open an engine and ask it."""

    @pytest.fixture(autouse=True)
    def settings(self, model: str, capabilities: Capabilities) -> None:
        """Note what the tests are about."""
        self.model_name, self.can = model, capabilities

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Engine]:
        """Open an engine, deterministic where the backend can be; check its tables before it closes."""
        config = self.config(self.model_name, **{"deterministic": self.can.deterministic, **options})
        async with Engine.open(config=config) as engine:
            yield engine
            engine.check_integrity()

    def params(self, **fields: Any) -> slotline.SamplingParams:
        """Return greedy parameters that run to max_tokens, as far as the backend can."""
        if "ignore_eos" in self.can.params:
            fields.setdefault("ignore_eos", True)
        if "temperature" in self.can.params:
            fields.setdefault("temperature", 0)
        return slotline.SamplingParams(**{"max_tokens": 12, **fields})

    def needs(self, *fields: str) -> None:
        """Skip a test of what the backend does not declare."""
        missing = [name for name in fields if name not in self.can.params]
        if missing:
            pytest.skip(f"not declared: {', '.join(missing)}")

    def needs_logprobs(self) -> None:
        """Skip a test of logprobs where there are none."""
        if not self.can.logprobs:
            pytest.skip("logprobs are not declared")


class AnswerConformance(EngineBase):
    """What an answer is: its parts agree, and it does not depend on how it is fetched."""

    @in_loop
    async def test_the_engine_has_the_backend_s_capabilities(self) -> None:
        async with self.open() as engine:
            ours, declared = engine.capabilities, self.can
            assert (ours.params, ours.logprobs, ours.logprobs_modes) == (
                declared.params, declared.logprobs, declared.logprobs_modes,
            )  # fmt: skip

    @in_loop
    async def test_streamed_equals_whole(self) -> None:
        params = self.params(logprobs=2) if self.can.logprobs else self.params()
        async with self.open() as engine:
            whole = await engine.generate(TEXT, params)
            pieces = [piece async for piece in engine.stream(TEXT, params)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason
        if whole.logprobs is not None:
            streamed = [entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs]
            assert [list(entry or ()) for entry in streamed] == [list(entry or ()) for entry in whole.logprobs]

    @in_loop
    async def test_the_text_is_that_of_the_tokens(self) -> None:
        async with self.open() as engine:
            done = await engine.generate(TEXT, self.params(max_tokens=24))
            assert done.text == engine.decode(done.token_ids)

    @in_loop
    async def test_text_and_ids_are_the_same_prompt(self) -> None:
        async with self.open() as engine:
            ids = engine.encode(TEXT)
            by_text, by_ids = [await engine.generate(prompt, self.params()) for prompt in (TEXT, ids)]
        assert by_text.token_ids == by_ids.token_ids
        assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
        assert by_text.usage.prompt_tokens == len(ids)

    @in_loop
    async def test_max_tokens(self) -> None:
        async with self.open() as engine:
            longer = await engine.generate(TEXT, self.params(max_tokens=9))
            for most in (1, 2, 7):
                done = await engine.generate(TEXT, self.params(max_tokens=most))
                assert done.token_ids == longer.token_ids[:most]
                if "ignore_eos" in self.can.params:
                    assert len(done.token_ids) == most and done.finish_reason == "length"

    @in_loop
    async def test_lengths_agree(self) -> None:
        self.needs_logprobs()
        async with self.open() as engine:
            for mode in self.can.logprobs_modes:
                for width in (0, 1, min(5, self.can.max_logprobs)):
                    done = await engine.generate(TEXT, self.params(logprobs=width, logprobs_mode=mode))
                    assert done.logprobs is not None and not done.warnings
                    assert len(done.token_ids) == len(done.logprobs) == done.usage.completion_tokens
                    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
                        assert entry is not None and next(iter(entry)) == token and len(entry) <= width + 1

    @in_loop
    async def test_logprobs_do_not_change_the_answer(self) -> None:
        self.needs_logprobs()
        async with self.open() as engine:
            without = await engine.generate(TEXT, self.params())
            with_them = await engine.generate(TEXT, self.params(logprobs=1))
        assert without.logprobs is None
        assert without.token_ids == with_them.token_ids

    @in_loop
    async def test_prompt_logprobs_have_one_entry_per_token(self) -> None:
        if not self.can.prompt_logprobs:
            pytest.skip("prompt_logprobs are not declared")
        async with self.open() as engine:
            done = await engine.generate(TEXT, self.params(prompt_logprobs=1, max_tokens=2))
        assert done.prompt_logprobs is not None and len(done.prompt_logprobs) == len(done.prompt_token_ids)
        first, *rest = done.prompt_logprobs
        assert first is None
        assert [next(iter(entry or ())) for entry in rest] == done.prompt_token_ids[1:]

    @in_loop
    async def test_prompts_are_embedded_or_refused(self) -> None:
        async with self.open() as engine:
            if not self.can.embeddings:
                with pytest.raises(UnsupportedParameter):
                    await engine.embed([TEXT])
                return
            one, other, again = [v for v in await engine.embed([TEXT, TEXT + "!", TEXT])]
            (alone,) = await engine.embed([TEXT])  # with its prefix cached
        assert float(one @ one) == pytest.approx(1, abs=1e-4) and one.ndim == 1
        assert again == pytest.approx(one, abs=1e-3) and alone == pytest.approx(one, abs=1e-3)
        assert other != pytest.approx(one, abs=1e-3)

    @in_loop
    async def test_choices_have_an_answer_each(self) -> None:
        async with self.open() as engine:
            done = await engine.generate(TEXT, self.params(n=3, max_tokens=5))
        assert [choice.index for choice in done.choices] == [0, 1, 2] and done is done.choices[0]
        assert done.usage.completion_tokens == sum(len(choice.token_ids) for choice in done.choices)
        assert done.usage.prompt_tokens == len(done.prompt_token_ids)

    @in_loop
    async def test_a_stop_string_ends_the_answer(self) -> None:
        async with self.open() as engine:
            plain = await engine.generate(TEXT, self.params(max_tokens=24))
            stop = plain.text[len(plain.text) // 2 :][:2]
            if not stop:
                pytest.skip("the answer has no text")
            done = await engine.generate(TEXT, self.params(max_tokens=24, stop=stop))
        assert done.text == plain.text[: plain.text.index(stop)]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.token_ids == plain.token_ids[: len(done.token_ids)]

    @in_loop
    async def test_what_does_not_fit_is_refused(self) -> None:
        async with self.open(max_model_len=64) as engine:
            long = engine.encode(TEXT * 64)
            with pytest.raises(ContextLengthExceeded):
                await engine.generate(long[:65], self.params())
            with pytest.raises(ContextLengthExceeded):
                await engine.generate(long[:50], self.params(max_tokens=15))
            fits = await engine.generate(long[:50], self.params(max_tokens=14))
            assert len(fits.token_ids) <= 14


class CapabilityConformance(EngineBase):
    """What is declared is honoured; what is not declared is warned of, or refused."""

    @pytest.mark.parametrize("name", sorted(SOFT_PARAMS))
    @in_loop
    async def test_an_undeclared_field_is_warned_of(self, name: str) -> None:
        if name in self.can.params:
            pytest.skip("declared")
        async with self.open() as engine:
            plain = await engine.generate(TEXT, self.params())
            done = await engine.generate(TEXT, self.params(**{name: EXAMPLES[name]}))
        assert [(w.code, w.param) for w in done.warnings] == [(f"{name}_unsupported", name)]
        assert not plain.warnings and done.token_ids == plain.token_ids

    @pytest.mark.parametrize("name", sorted(HARD_PARAMS))
    @in_loop
    async def test_an_undeclared_field_without_which_the_answer_is_wrong_is_refused(self, name: str) -> None:
        if name in self.can.params:
            pytest.skip("declared")
        async with self.open() as engine:
            with pytest.raises(UnsupportedParameter) as caught:
                await engine.generate(TEXT, slotline.SamplingParams(max_tokens=4, **{name: EXAMPLES[name]}))
        assert caught.value.param == name

    @pytest.mark.parametrize("name", sorted(ALL_PARAMS))
    @in_loop
    async def test_a_declared_field_brings_no_warning(self, name: str) -> None:
        self.needs(name)
        async with self.open() as engine:
            done = await engine.generate(TEXT, self.params(**{name: EXAMPLES[name]}))
        assert not done.warnings

    @pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
    @in_loop
    async def test_undeclared_logprobs_are_warned_of(self, name: str) -> None:
        if getattr(self.can, name):
            pytest.skip("declared")
        async with self.open() as engine:
            done = await engine.generate(TEXT, self.params(**{name: 2}))
        assert getattr(done, name) is None
        assert [(w.code, w.param) for w in done.warnings] == [(f"{name}_unsupported", name)]

    @in_loop
    async def test_an_undeclared_logprobs_mode_is_refused(self) -> None:
        self.needs_logprobs()
        missing = {"raw", "processed"} - set(self.can.logprobs_modes)
        if not missing:
            pytest.skip("all modes are declared")
        async with self.open() as engine:
            with pytest.raises(UnsupportedParameter) as caught:
                await engine.generate(TEXT, self.params(logprobs=1, logprobs_mode=missing.pop()))
        assert caught.value.param == "logprobs_mode"

    @in_loop
    async def test_logprobs_are_capped(self) -> None:
        self.needs_logprobs()
        async with self.open(max_logprobs=4) as engine:
            with pytest.raises(InvalidParameter) as caught:
                await engine.generate(TEXT, self.params(logprobs=5))
        assert caught.value.param == "logprobs"

    async def answer(self, engine: Engine, **fields: Any) -> Completion:
        """Return one answer."""
        return await engine.generate(TEXT, self.params(**fields))

    @in_loop
    async def test_temperature_makes_answers_differ(self) -> None:
        self.needs("temperature", "seed")
        async with self.open() as engine:
            drawn = [await self.answer(engine, temperature=2, seed=seed) for seed in range(8)]
        assert len({tuple(done.token_ids) for done in drawn}) > 1

    @in_loop
    async def test_a_seed_repeats_an_answer(self) -> None:
        self.needs("seed")
        hot = {"temperature": 2} if "temperature" in self.can.params else {}
        async with self.open() as engine:
            first, other, again = [await self.answer(engine, seed=seed, max_tokens=24, **hot) for seed in (5, 6, 5)]
        assert first.token_ids == again.token_ids != other.token_ids

    @pytest.mark.parametrize(("name", "value"), [("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)])
    @in_loop
    async def test_the_narrowest_truncation_is_greedy(self, name: str, value: float) -> None:
        self.needs(name, "temperature")
        async with self.open() as engine:
            greedy = await self.answer(engine)
            narrow = await self.answer(engine, temperature=1.5, **{name: value})
        assert narrow.token_ids == greedy.token_ids

    @pytest.mark.parametrize(("name", "value"), EXTREMES)
    @in_loop
    async def test_the_ends_of_every_range_are_answered(self, name: str, value: Any) -> None:
        """What passes the checks must not make a step fail, for the others in it least of all."""
        self.needs(name, "temperature")
        hot = {} if name == "temperature" else {"temperature": 1.5}
        async with self.open() as engine:
            alone = await self.answer(engine)
            extreme, beside = await asyncio.gather(self.answer(engine, **hot, **{name: value}), self.answer(engine))
        assert extreme.finish_reason == "length" and len(extreme.token_ids) == len(alone.token_ids)
        assert beside.token_ids == alone.token_ids

    @pytest.mark.parametrize(
        ("name", "value"), [("repetition_penalty", 10.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)]
    )
    @in_loop
    async def test_penalties_make_repetition_rarer(self, name: str, value: float) -> None:
        self.needs(name)
        async with self.open() as engine:
            plain = await self.answer(engine, max_tokens=48)
            penalised = await self.answer(engine, max_tokens=48, **{name: value})
        if len(set(plain.token_ids)) == len(plain.token_ids):
            pytest.skip("the answer repeats nothing")
        assert len(set(penalised.token_ids)) > len(set(plain.token_ids))

    @in_loop
    async def test_logit_bias(self) -> None:
        self.needs("logit_bias")
        async with self.open() as engine:
            plain = await self.answer(engine)
            wanted = next(i for i in engine.encode(TEXT) if i not in plain.token_ids[:1])
            pushed = await self.answer(engine, logit_bias={wanted: 100.0})
            banned = await self.answer(engine, logit_bias={plain.token_ids[0]: -100.0})
        assert set(pushed.token_ids) == {wanted}
        assert banned.token_ids[0] != plain.token_ids[0]

    @in_loop
    async def test_allowed_token_ids(self) -> None:
        self.needs("allowed_token_ids")
        async with self.open() as engine:
            allowed = set(engine.encode(TEXT)[:4])
            done = await self.answer(engine, allowed_token_ids=sorted(allowed))
        assert set(done.token_ids) <= allowed

    @in_loop
    async def test_bad_words(self) -> None:
        self.needs("bad_words")
        async with self.open() as engine:
            plain = await self.answer(engine, max_tokens=24)
            words = {i: engine.decode([i]) for i in plain.token_ids}
            usable = [i for i, word in words.items() if word and engine.encode("a" + word)[-1:] == [i]]
            if not usable:
                pytest.skip("no token of the answer is a word of its own")
            done = await self.answer(engine, max_tokens=24, bad_words=[words[usable[0]]])
        assert usable[0] not in done.token_ids

    @in_loop
    async def test_stop_token_ids(self) -> None:
        self.needs("stop_token_ids")
        async with self.open() as engine:
            plain = await self.answer(engine)
            stop = plain.token_ids[len(plain.token_ids) // 2]
            done = await self.answer(engine, stop_token_ids=[stop])
        assert done.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)

    @in_loop
    async def test_min_tokens(self) -> None:
        self.needs("min_tokens", "stop_token_ids")
        async with self.open() as engine:
            stop = (await self.answer(engine)).token_ids[0]
            early = await self.answer(engine, stop_token_ids=[stop])
            late = await self.answer(engine, stop_token_ids=[stop], min_tokens=3)
        assert early.token_ids == [stop]
        assert len(late.token_ids) >= 3
        assert late.finish_reason == "length" or late.token_ids.index(stop, 3) == len(late.token_ids) - 1

    @in_loop
    async def test_ignore_eos(self) -> None:
        self.needs("ignore_eos", "logit_bias")
        async with self.open() as engine:
            ends = sorted(engine.model.eos_ids)
            if not ends:
                pytest.skip("the model has no end token")
            bias = {ends[0]: 100.0}
            ended = await self.answer(engine, logit_bias=bias, ignore_eos=False)
            ignored = await self.answer(engine, logit_bias=bias, ignore_eos=True, max_tokens=5)
        assert ended.token_ids == ends[:1]
        assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
        assert ignored.token_ids == ends[:1] * 5 and ignored.finish_reason == "length"
