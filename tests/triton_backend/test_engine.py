"""The triton backend in an engine: interpreted on a CPU in a process of its own, compiled on a GPU.

``test_interpreted`` starts this file again with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slotline
from slotline import SamplingParams
from slotline.errors import ConfigError, ModelError, StepFailed
from slotline.plan import RowSetup, StepPlan
from slotline.testing import BackendConformance, write_tiny_llama

pytest_plugins = ["slotline.testing"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TEXT = "the quick ox and the dog saw the quick dog "
compiled = pytest.mark.gpu
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_interpreted starts")

# One small model for each thing that a decoder may have.
MODELS = {
    "grouped": {},
    "multi-query, wide heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
    "window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
}


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(400)
def test_interpreted() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"}
    # Padding is computed from whatever memory holds; numpy warns of numbers that a GPU passes over in silence.
    quiet = ["-W", "ignore::RuntimeWarning"]
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-m", "not gpu", *quiet]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 11, done.stdout[-500:]


async def answers(folder: Path, backend: str, texts: list[Any], params: SamplingParams, **options: Any) -> Any:
    """Ask all texts at once; return completions and statistics."""
    common = {"max_slots": 3, "kv_cache_tokens": 512, "max_batch_tokens": 40, "dtype": "float32"}
    async with slotline.Engine.open(str(folder), backend=backend, **(common | options)) as engine:
        done = await asyncio.gather(*(engine.generate(text, params) for text in texts))
        engine.check_integrity()
        return done, engine.stats()


def compare(ours: Any, expected: Any) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert a.token_ids == b.token_ids
        for x, y in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            for mine, theirs in zip(x or (), y or (), strict=True):
                assert mine == (None if theirs is None else pytest.approx(theirs, abs=1e-4))


@interpreted
@pytest.mark.parametrize("model", MODELS)
async def test_it_answers_like_the_torch_backend(model: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, **MODELS[model])
    texts = [TEXT[: 3 + 9 * i] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected, _ = await answers(folder, "torch", texts, params, device="cpu")
    ours, _ = await answers(folder, "triton", texts, params)
    compare(ours, expected)


@interpreted
async def test_draws_and_cached_prefixes(tiny_llama: Path) -> None:
    texts = [TEXT * 4, TEXT * 4 + "ox", "dog", TEXT * 4]
    params = SamplingParams(temperature=1.2, seed=5, top_k=20, max_tokens=6, ignore_eos=True)
    expected, _ = await answers(tiny_llama, "torch", texts, params, device="cpu")
    ours, stats = await answers(tiny_llama, "triton", texts, params)
    assert [a.token_ids for a in ours] == [b.token_ids for b in expected]
    assert stats.prefix_hits > 0


@interpreted
async def test_the_deterministic_mode_answers_the_same(tiny_llama: Path) -> None:
    """Products and attention have one shape here; that bits are equal in any company is for a GPU to show."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    texts = [TEXT[:20], TEXT[:9]]
    expected, _ = await answers(tiny_llama, "torch", texts, params, device="cpu")
    ours, _ = await answers(tiny_llama, "triton", texts, params, deterministic=True)
    compare(ours, expected)


@interpreted
async def test_long_products_are_added_to_the_residual(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.triton_backend import products, weights

    rows, add = [], weights.Linear.add

    def note(self: Any, x: Any, residual: Any) -> None:
        rows.append(len(x))
        add(self, x, residual)

    monkeypatch.setattr(products, "ADDED", 8)
    monkeypatch.setattr(weights.Linear, "add", note)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    texts = [TEXT[:20], TEXT[:9]]
    expected, _ = await answers(tiny_llama, "torch", texts, params, device="cpu")
    ours, _ = await answers(tiny_llama, "triton", texts, params)
    compare(ours, expected)
    assert rows and min(rows) >= 8


@interpreted
async def test_masks_are_waited_for_between_forward_and_draw(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's mask may need the step before: the forward pass is launched before anybody waits for it."""
    from slotline.planner import Planner
    from slotline.plugins.triton_backend.graphs import StepGraphs
    from slotline.plugins.triton_backend.runner import Runner

    events: list[str] = []
    build, forward, at_once = Planner._build, StepGraphs.forward, Runner._forward_at_once

    class Mask:
        def __init__(self, rows: np.ndarray) -> None:
            self.rows = rows

        def wait(self) -> tuple[np.ndarray, np.ndarray]:
            events.append("wait")
            packed = np.zeros((len(self.rows), 9), np.uint32)
            packed[:, 2] = 1 << 7  # nothing but id 71
            return self.rows, packed

    def note(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append("forward")
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(Planner, "_build", lambda *args: replace(plan := build(*args), masks=Mask(plan.rows)))
    monkeypatch.setattr(StepGraphs, "forward", note(forward))
    monkeypatch.setattr(Runner, "_forward_at_once", note(at_once))
    params = SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True, logprobs=1)
    done, _ = await answers(tiny_llama, "triton", ["the dog", "ox"], params)
    assert [answer.token_ids for answer in done] == [[71] * 3] * 2
    assert events and events == ["forward", "wait"] * (len(events) // 2)


@interpreted
async def test_prompts_are_embedded(tiny_llama: Path) -> None:
    found = []
    for backend, own in (("torch", {"device": "cpu"}), ("triton", {})):
        options = {"max_slots": 3, "kv_cache_tokens": 512, "dtype": "float32", "max_batch_tokens": 16, **own}
        async with slotline.Engine.open(str(tiny_llama), backend=backend, **options) as engine:
            found.append(await engine.embed([TEXT[:30], TEXT[:9]]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


@interpreted
async def test_special_requests_beside_plain_ones(tiny_llama: Path) -> None:
    """Rows whose logits are changed, or that want wide or processed tables, leave the recorded steps; others stay."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    asked = [
        SamplingParams(**common, repetition_penalty=1.4, logprobs=1),
        SamplingParams(**common | {"temperature": 0.8}, seed=3, top_k=4, logprobs=2, logprobs_mode="processed"),
        SamplingParams(**common, logprobs=30, logit_bias={9: 3.0}),
    ]
    await same_answers(tiny_llama, asked)


@interpreted
async def test_penalties_and_minimum_lengths_stay_in_the_recorded_steps(tiny_llama: Path) -> None:
    """The device counts the tokens of each row by itself."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    asked = [
        SamplingParams(**common, ignore_eos=True, repetition_penalty=1.6, logprobs=1),
        SamplingParams(**common | {"temperature": 0.9}, seed=4, presence_penalty=0.9, frequency_penalty=1.5),
        SamplingParams(**common, min_tokens=4, stop_token_ids=list(range(100, 130))),
    ]
    await same_answers(tiny_llama, asked)


@interpreted
def test_a_row_that_comes_back_counts_its_answer_again() -> None:
    import torch

    from slotline.plugins.torch_backend.processing import Processors
    from slotline.plugins.triton_backend.rows import RowTable, new_seen, new_state

    device, vocab = torch.device("cpu"), 40
    state, seen = new_state(3, 128, device), new_seen(3, vocab, device)
    assert seen is not None
    rows = RowTable(state, seen, vocab, Processors({}, None))  # type: ignore[arg-type]  # nothing asks for it
    seen[1] = 7  # of the occupant before
    setup = RowSetup(
        row=1,
        epoch=4,
        params=SamplingParams(max_tokens=9, frequency_penalty=0.5).resolved({}),
        seed=0,
        token_ids=np.array([5, 5, 6, 9, 9, 5], np.int32),
        prompt_len=3,
        stop_ids=(),
        min_len=3,
        max_len=12,
    )
    one = np.ones(1, np.int32)
    tokens = setup.token_ids
    plan = StepPlan(
        1,
        one,
        4 * one.astype(np.int64),
        0 * one,
        6 * one,
        tokens,
        np.array([0, 1], np.int32),
        2 * one,
        one > 0,
        (setup,),
    )
    rows.apply(plan)
    assert {i: n for i, n in enumerate(seen[1].tolist()) if n} == {5: 3, 6: 1, 9: 4}
    assert rows.adjusts(plan.rows, np.array([6])) and not seen[[0, 2]].any()


async def same_answers(folder: Path, asked: list[SamplingParams]) -> None:
    """Hold answers of both backends against each other."""
    answered = []
    for backend, own in (("torch", {"device": "cpu"}), ("triton", {})):
        options = {"max_slots": 3, "kv_cache_tokens": 512, "dtype": "float32", "max_logprobs": 40, **own}
        async with slotline.Engine.open(str(folder), backend=backend, **options) as engine:
            answered.append(await asyncio.gather(*(engine.generate(TEXT[:12], params) for params in asked)))
    compare(*answered)


@interpreted
async def test_what_it_cannot_do_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    partial = write_tiny_llama(
        tmp_path, architectures=["LlamaForCausalLM"], rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    )
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ModelError, match="use backend torch"):
        await answers(partial, "triton", ["x"], params)
    with pytest.raises(ConfigError, match="block_size is 16"):
        await answers(tiny_llama, "triton", ["x"], params, block_size=16)


@compiled
class TestTriton(BackendConformance, backend="triton", dtype="float32"):
    """All that slotline expects of a backend, on a GPU."""

    @pytest.fixture
    def model(self, tiny_llama: Path) -> str:
        return str(tiny_llama)


@interpreted
async def test_a_whole_prompt_takes_library_attention(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt from its beginning on, as long as it fits, padded or not; not its second chunk, nor two prompts."""
    from slotline.plugins.triton_backend.graphs import FEW_TOKENS, FEW_WHOLES, StepGraphs

    taken: list[int] = []
    whole = StepGraphs.whole
    monkeypatch.setattr(StepGraphs, "whole", lambda self, size: taken.append(size) or whole(self, size))
    (most,) = FEW_WHOLES
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
    rng = np.random.default_rng(0)
    for lengths, times in (
        ((most,), 1),
        ((FEW_TOKENS[-1] + 1,), 1),
        ((most + 9,), 1),
        ((20, 15), 0),
        ((most + 30,), 1),
    ):
        prompts = [rng.integers(1, 200, length).tolist() for length in lengths]
        expected, _ = await answers(tiny_llama, "torch", prompts, params, device="cpu")
        taken.clear()
        ours, _ = await answers(tiny_llama, "triton", prompts, params)
        assert taken == [most] * times, lengths
        compare(ours, expected)


@interpreted
async def test_the_front_of_long_chunks_takes_library_attention(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are whole tiles, since the library gets ready for each new one; the tail reads pages."""
    from slotline.plugins.triton_backend import attention, runner

    taken: list[tuple[int, int]] = []
    within = attention._within
    monkeypatch.setattr(runner, "LONG", attention.TILE)
    monkeypatch.setattr(
        attention, "_within", lambda whole, *rest: taken.append((whole.begin, whole.end)) or within(whole, *rest)
    )
    prompts = [np.random.default_rng(n).integers(1, 200, n).tolist() for n in (260, 7, 150)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
    options = {"kv_cache_tokens": 1024, "max_batch_tokens": 512}
    expected, _ = await answers(tiny_llama, "torch", prompts, params, device="cpu", **options)
    ours, _ = await answers(tiny_llama, "triton", prompts, params, **options)
    assert set(taken) == {(0, 256), (267, 395)}
    compare(ours, expected)


@interpreted
async def test_a_full_collection_leaves_out_what_is_loaded(tiny_llama: Path) -> None:
    at_first = gc.get_freeze_count()
    async with slotline.Engine.open(str(tiny_llama), backend="triton", max_slots=2, kv_cache_tokens=512):
        assert gc.get_freeze_count() > at_first + 50_000
    assert gc.get_freeze_count() == 0


@interpreted
@pytest.mark.parametrize("where", ["launch", "result"])
async def test_what_failed_or_was_closed_makes_room_at_once(
    where: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which may take its time: weights and the cache fill most of a GPU."""
    from slotline.plugins.triton_backend.backend import TritonBackend
    from slotline.plugins.triton_backend.results import LaunchedStep
    from slotline.plugins.triton_backend.runner import Runner

    made: list[weakref.ref[Any]] = []
    left: list[int] = []
    owner: Any = Runner if where == "launch" else LaunchedStep
    load, step, steps = TritonBackend.load, getattr(owner, where), itertools.count()

    def counted(self: TritonBackend, *args: Any) -> Any:
        left.append(sum(decoder() is not None for decoder in made))
        info = load(self, *args)
        made.append(weakref.ref(self._loaded()._decoder))
        return info

    def failing(self: Any, *args: Any) -> Any:
        if next(steps) == 2:
            raise RuntimeError("injected")
        return step(self, *args)

    monkeypatch.setattr(TritonBackend, "load", counted)
    monkeypatch.setattr(owner, where, failing)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    gc.collect()
    gc.disable()
    try:
        options = {"max_slots": 2, "kv_cache_tokens": 512}
        async with slotline.Engine.open(str(tiny_llama), backend="triton", **options) as engine:
            with pytest.raises(StepFailed, match="injected"):
                await engine.generate("the dog", params)
            assert len((await engine.generate("the dog", params)).token_ids) == 6
        assert left == [0, 0] and [decoder() for decoder in made] == [None, None]
    finally:
        gc.enable()
