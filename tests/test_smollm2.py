"""The real model through the whole engine: transformers' tokens, and the reference values of this model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import slotline
from slotline import SamplingParams

GREEDY = {"temperature": 0}
FRANCE = "The capital of France is"
ALPHABET = "Here is the English alphabet: ABC"
COUNT = "1, 2, 3, 4, 5, 6,"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[slotline.Engine]:
    async with slotline.Engine.open(max_slots=4, threads=1, kv_cache_tokens=8192) as engine:
        yield engine
        engine.check_integrity()


def transformers_greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Return what ``generate`` gives."""
    import torch

    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def transformers_choices(model: Any, ids: list[int], answer: list[int]) -> list[int]:
    """Return the best next token at each place of an answer: equal to it just where ``generate`` gives it."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids + answer])).logits[0]
    return logits[len(ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.timeout(600)
async def test_twenty_prompts_in_four_slots_give_the_tokens_of_transformers(
    engine: slotline.Engine, smollm2_reference: Any, mixed_prompts: list[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    done = await asyncio.gather(*(engine.generate(p, params) for p in mixed_prompts))
    for completion in done:
        expected = transformers_choices(smollm2_reference, completion.prompt_token_ids, completion.token_ids)
        assert completion.token_ids == expected, engine.decode(completion.prompt_token_ids)
    for completion in done[::9]:
        assert completion.token_ids == transformers_greedy(smollm2_reference, completion.prompt_token_ids, 64)
    lengths = [len(c.prompt_token_ids) for c in done]
    assert min(lengths) <= 2 and max(lengths) > 200


async def test_eight_identical_prompts_give_eight_identical_answers(mixed_prompts: list[str]) -> None:
    async with slotline.Engine.open(max_slots=8, threads=1, kv_cache_tokens=4096) as engine:
        handle = await engine.submit([mixed_prompts[9]] * 8, SamplingParams(temperature=0, max_tokens=48))
        done = await handle.completions()
        assert len({tuple(c.token_ids) for c in done}) == 1


async def test_reference_ids_and_greedy_texts(engine: slotline.Engine) -> None:
    assert engine.encode(FRANCE) == [504, 3575, 282, 4649, 314]
    assert len(engine.encode(ALPHABET)) == 7 and len(engine.encode(COUNT)) == 17
    assert engine.info.vocab_size == 49152 and engine.max_model_len == 8192 and engine.model.eos_ids == {2}

    france = await engine.generate(FRANCE, SamplingParams(**GREEDY, max_tokens=8, logprobs=2))
    assert france.token_ids == [7042, 30, 198, 198, 504, 2988, 314, 42]
    assert france.text == " Paris.\n\nThe answer is:"
    top = france.logprobs.entries(0)
    assert [t.text for t in top] == [" Paris", " the"]
    assert [t.logprob for t in top] == pytest.approx([-0.258, -2.741], abs=2e-3)

    alphabet = await engine.generate(ALPHABET, SamplingParams(**GREEDY, max_tokens=14))
    pieces = [engine.decode([i]) for i in alphabet.token_ids]
    assert pieces == ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W", "XY", "Z"]

    count = await engine.generate(COUNT, SamplingParams(**GREEDY, max_tokens=16, logprobs=2))
    assert count.token_ids == [216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33]
    assert [t.logprob for t in count.logprobs.entries(0)] == pytest.approx([-0.053, -3.737], abs=2e-3)


async def test_reference_chat_counts_and_answer(engine: slotline.Engine) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    done = await engine.generate(hello, SamplingParams(**GREEDY, max_tokens=40))
    assert done.usage.prompt_tokens == 31
    assert done.text == "Hello! How can I assist you today?"
    assert done.token_ids[-1] == 2 and len(done.token_ids) == 10 and done.finish_reason == "stop"
    brief = await engine.chat_prompt([{"role": "system", "content": "Be brief."}, *hello])
    assert len(brief) == 18
    assert len(await engine.chat_prompt([{"role": "user", "content": ""}])) == 30


async def test_reference_scores(engine: slotline.Engine) -> None:
    (score,) = await engine.score([FRANCE + " Paris"])
    assert score.logprobs[0] is None
    assert score.logprobs[1:] == pytest.approx([-11.539, -0.338, -2.439, -0.451, -0.258], abs=2e-3)
    assert score.total == pytest.approx(sum(score.logprobs[1:]))


@pytest.mark.parametrize(
    ("prompt", "fields", "text", "tokens", "reason"),
    [
        (ALPHABET, {"max_tokens": 20, "stop": ["DEFGHIJ"]}, "", 4, "stop"),
        (ALPHABET, {"max_tokens": 20, "stop": ["DEFGHIJK"]}, "", 5, "stop"),
        (FRANCE, {"max_tokens": 5, "logit_bias": {49: 100}, "stop": ["AB", "AAAAAAB"]}, "AAAAA", 5, "length"),
        (FRANCE, {"max_tokens": 8, "logit_bias": {260: 100}, "stop": "e t"}, " th", 2, "stop"),
        (
            FRANCE,
            {"max_tokens": 8, "logit_bias": {260: 100}, "stop": "e t", "include_stop_str_in_output": True},
            " the t",
            2,
            "stop",
        ),
        (FRANCE, {"max_tokens": 16, "stop": ["\n\n"]}, " Paris.", 4, "stop"),
        (ALPHABET, {"max_tokens": 6, "stop": ["ABC"]}, "DEFGHIJKLM", 6, "length"),
        (FRANCE, {"max_tokens": 3, "logit_bias": {143: 100}}, "\ufffd" * 3, 3, "length"),
        (FRANCE, {"max_tokens": 1, "logit_bias": {10813: 100}}, "\ufffd", 1, "length"),
        (FRANCE, {"max_tokens": 3, "logit_bias": {260: 100}}, " the the the", 3, "length"),
        (FRANCE, {"max_tokens": 4, "ignore_eos": True, "logit_bias": {2: 100}}, "", 4, "length"),
        (
            FRANCE,
            {"max_tokens": 4, "ignore_eos": True, "logit_bias": {2: 100}, "skip_special_tokens": False},
            "<|im_end|>" * 4,
            4,
            "length",
        ),
        (COUNT, {"max_tokens": 1, "frequency_penalty": 2.0}, " ", 1, "length"),
        (FRANCE, {"max_tokens": 1, "top_p": 0.1, "top_k": 3, "seed": 9}, " Paris", 1, "length"),
    ],
)
async def test_reference_stops_biases_and_penalties(
    engine: slotline.Engine, prompt: str, fields: dict[str, Any], text: str, tokens: int, reason: str
) -> None:
    params = SamplingParams(**GREEDY, **fields)
    whole = await engine.generate(prompt, params)
    assert (whole.text, len(whole.token_ids), whole.finish_reason) == (text, tokens, reason)
    pieces = [piece async for piece in engine.stream(prompt, params)]
    assert "".join(p.text for p in pieces) == text
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-30])
async def test_a_tiny_temperature_is_greedy(engine: slotline.Engine, temperature: float) -> None:
    done = await engine.generate(FRANCE, SamplingParams(temperature=temperature, max_tokens=1))
    assert done.text == " Paris"


async def test_min_tokens_holds_end_tokens_back(engine: slotline.Engine) -> None:
    held = await engine.generate(FRANCE, SamplingParams(**GREEDY, min_tokens=5, max_tokens=10, logit_bias={2: 100}))
    assert len(held.token_ids) == 6 and held.token_ids[-1] == 2 and 2 not in held.token_ids[:5]
    by_id = await engine.generate(
        FRANCE, SamplingParams(**GREEDY, min_tokens=5, max_tokens=10, logit_bias={42: 100}, stop_token_ids=[42])
    )
    assert len(by_id.token_ids) == 6 and 42 not in by_id.token_ids[:5]


async def test_a_seed_gives_the_same_answer_in_any_company(engine: slotline.Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    alone = await engine.generate(FRANCE, params)
    noise = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    others = [engine.generate("The capital of Germany is", noise) for _ in range(7)]
    done = await asyncio.gather(*others[:3], engine.generate(FRANCE, params), *others[3:])
    assert done[3].token_ids == alone.token_ids
    assert len({tuple(d.token_ids) for i, d in enumerate(done) if i != 3}) > 1


async def test_choices_of_one_request_differ_and_come_again(engine: slotline.Engine) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=16)
    first = (await engine.generate("Once upon a time", params)).choices
    again = (await engine.generate("Once upon a time", params)).choices
    assert [c.text for c in first] == [c.text for c in again]
    assert len({c.text for c in first}) > 1
    greedy = (await engine.generate("Once upon a time", SamplingParams(**GREEDY, n=4, max_tokens=8))).choices
    assert len({c.text for c in greedy}) == 1


async def test_sixteen_biased_requests_do_not_mix(engine: slotline.Engine) -> None:
    tasks = [
        engine.generate(f"Repeat the word W{i}:", SamplingParams(**GREEDY, max_tokens=12, logit_bias={49 + i: 100}))
        for i in range(16)
    ]
    for i, done in enumerate(await asyncio.gather(*tasks)):
        assert done.token_ids == [49 + i] * 12


async def test_preemption_does_not_change_answers(engine: slotline.Engine, mixed_prompts: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    alone = [await engine.generate(topic, params) for topic in mixed_prompts[4:10]]
    async with slotline.Engine.open(max_slots=6, threads=1, kv_cache_tokens=256, max_batch_tokens=16) as small:
        together = await asyncio.gather(*(small.generate(topic, params) for topic in mixed_prompts[4:10]))
        assert small.stats().preemptions > 0
        assert [t.token_ids for t in together] == [a.token_ids for a in alone]


async def test_a_cached_prefix_does_not_change_the_answer(engine: slotline.Engine, mixed_prompts: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    cold = await engine.generate(mixed_prompts[-1], params, cache_salt="cold")
    warm = await engine.generate(mixed_prompts[-1], params, cache_salt="cold")
    assert cold.usage.cached_tokens == 0 and warm.usage.cached_tokens > 200
    assert warm.token_ids == cold.token_ids


def test_the_pipeline_answers_lists_streams_and_scores() -> None:
    with slotline.pipeline(max_slots=4, threads=1, kv_cache_tokens=4096) as pipe:
        one = pipe(FRANCE, SamplingParams(**GREEDY, max_tokens=2))
        many = pipe([FRANCE, ALPHABET], SamplingParams(**GREEDY, max_tokens=2))
        assert one.text == many[0].text == " Paris." and many[1].text == "DEFGH"
        assert "".join(p.text for p in pipe.stream(FRANCE, SamplingParams(**GREEDY, max_tokens=2))) == " Paris."
        assert pipe.score(FRANCE + " Paris").logprobs[-1] == pytest.approx(-0.258, abs=2e-3)


async def test_an_embedding_is_the_last_hidden_state_of_transformers(
    engine: slotline.Engine, smollm2_reference: Any
) -> None:
    import torch

    ids = engine.encode(FRANCE)
    with torch.inference_mode():
        states = smollm2_reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    expected = (states / states.norm()).numpy()
    (found,) = await engine.embed([FRANCE])
    assert found == pytest.approx(expected, abs=1e-3) and float(found @ expected) > 0.9999
