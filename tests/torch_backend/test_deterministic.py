"""deterministic=True: the same bits in any company, however a row's tokens are cut into steps."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.plugins.torch_backend.decoder import TILE
from slotline.plugins.torch_backend.linear import linear_kind
from slotline.testing import StepDriver, Work

SHAPES = {
    "grouped": {},
    "odd widths": {"hidden_size": 42, "intermediate_size": 54, "num_attention_heads": 3, "num_key_value_heads": 1},
    "multi-query, biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
}


def bits(result, i: int) -> tuple[int, bytes]:
    """Return row i's token and the exact values of its logprobs."""
    place = int(result.n_tokens[:i].sum())
    entry = result.logprobs.slice(place, place + 1)
    return int(result.tokens[i, 0]), entry.ids.tobytes() + entry.values.tobytes() + entry.ranks.tobytes()


def alone(driver: StepDriver, prompt, count: int, **options) -> list[tuple[int, bytes]]:
    """Answer with nobody else there, the prompt in one chunk."""
    driver.admit(0, prompt, logprobs=20, max_tokens=count, **options)
    steps = [driver.step(Work(0, len(prompt)))] + [driver.step(Work(0, 1)) for _ in range(count - 1)]
    driver.end(0)
    return [bits(step, 0) for step in steps]


@st.composite
def schedules(draw) -> list[tuple[list[int], float, list[int]]]:
    """Draw sequences with their temperature and the sizes of their prompt's chunks."""
    found = []
    for i in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 150))
        prompt = [int(t) for t in np.random.default_rng(i + length).integers(0, 97, length)]
        cuts = sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)))
        bounds = [0, *[c for c in cuts if c < length], length]
        chunks = [b - a for a, b in pairwise(bounds)]
        found.append((prompt, draw(st.sampled_from([0.0, 1.0])), chunks))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_company_and_chunks_change_no_bit(tiny, load, shape):
    _, model = tiny(**SHAPES[shape])
    driver = load(model, deterministic=True)

    @given(schedules(), st.integers(0, 15))
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    def check(rows, shift):
        expected = [alone(driver, p, 4, seed=9, temperature=t) for p, t, _ in rows]
        slots = [(i + shift) % 16 for i in range(len(rows))]
        for slot, (prompt, temperature, _) in zip(slots, rows, strict=True):
            driver.admit(slot, prompt, logprobs=20, max_tokens=4, seed=9, temperature=temperature)
        left = {
            slot: [*[(n, False) for n in c[:-1]], (c[-1], True), *[(1, True)] * 3]
            for slot, (_, _, c) in zip(slots, rows, strict=True)
        }
        got = {slot: [] for slot in slots}
        while any(left.values()):
            order = sorted((s for s in slots if left[s]), key=lambda s: len(left[s]))
            work = [Work(s, *left[s].pop(0)) for s in order]
            result = driver.step(*work)
            for i, w in enumerate(work):
                if w.sample:
                    got[w.row].append(bits(result, i))
        driver.end(*slots)
        assert [got[slot] for slot in slots] == expected

    check()


def test_recomputing_after_a_preemption_changes_no_bit(tiny, load):
    _, model = tiny()
    driver = load(model, deterministic=True)
    prompt = list(range(60))
    whole = alone(driver, prompt, 12, temperature=1.0, seed=5)
    output = [token for token, _ in whole[:7]]
    driver.admit(3, prompt, output=output, logprobs=20, max_tokens=12, temperature=1.0, seed=5)
    steps = [driver.step(Work(3, 67))] + [driver.step(Work(3, 1)) for _ in range(4)]
    assert [bits(step, 0) for step in steps] == whole[7:]


def test_pages_shared_with_another_row_change_no_bit(tiny, load):
    """What the prefix cache does: a row begins behind blocks that another one filled."""
    _, model = tiny()
    backend = PlanRecorder()
    driver = load(model, backend, deterministic=True)
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 97, 100)]
    whole = alone(driver, prompt, 6)
    driver.admit(0, [*prompt[:64], 5, 6, 7], max_tokens=4)
    driver.step(Work(0, 67))
    shared = backend.plans[-1].block_ids[:4]
    driver.admit(1, prompt, logprobs=20, max_tokens=8)
    backend.rewrite = lambda plan: replace(
        plan,
        start=plan.start + 64,
        count=plan.count - 64,
        token_ids=plan.token_ids[64:],
        block_ids=np.concatenate([shared, plan.block_ids[4:]]),
    )
    first = driver.backend.launch(driver._plan([Work(1, 100)])).result()
    backend.rewrite = None
    steps = [first] + [driver.step(Work(1, 1)) for _ in range(5)]
    assert [bits(step, 0) for step in steps] == whole


class PlanRecorder(TorchBackend):
    """Keep the plans, and change one on its way in."""

    def __init__(self) -> None:
        super().__init__()
        self.plans, self.rewrite = [], None

    def launch(self, plan):
        plan = self.rewrite(plan) if self.rewrite else plan
        self.plans.append(plan)
        return super().launch(plan)


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (576, 3072), (1536, 576), (576, 4096), (42, 54)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_tile_s_row_depends_on_itself_alone(inputs, outputs, threads):
    """The ground that deterministic mode stands on: for a fixed M, place and neighbours do not matter."""
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear = linear_kind(torch.device("cpu"), torch.float32)(torch.randn(outputs, inputs, generator=generator))
        row = torch.randn(inputs, generator=generator)
        seen = set()
        for place in range(TILE):
            tile = torch.randn(TILE, inputs, generator=generator) * 10.0 ** (place % 5 - 2)
            tile[place] = row
            seen.add(linear(tile)[place].numpy().tobytes())
        assert len(seen) == 1
    finally:
        torch.set_num_threads(before)


def test_smollm2_chunks_and_company_change_no_bit(smollm2, load):
    driver = load(smollm2, deterministic=True, kv_cache_tokens=2048)
    prompt = smollm2.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)[:70]
    expected = alone(driver, prompt, 5)
    for row in range(4):
        driver.admit(row, prompt[row:], logprobs=20)
    steps = [driver.step(Work(1, 69), Work(0, 33, sample=False)), driver.step(Work(2, 68), Work(0, 36, sample=False))]
    steps += [driver.step(Work(3, 67), Work(1, 1), Work(0, 1))]
    steps += [driver.step(Work(1, 1), Work(0, 1), Work(3, 1)) for _ in range(4)]
    assert [bits(step, step.rows.tolist().index(0)) for step in steps[2:]] == expected
