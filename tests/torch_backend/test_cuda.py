"""The reference on a CUDA GPU: what it gives on a CPU, in every number format."""

from pathlib import Path

import numpy as np
import pytest

from slotline.testing import BackendConformance, Work

pytestmark = pytest.mark.gpu
pytest_plugins = ["slotline.testing"]

PROMPTS = [[5], [1, 2, 3], list(range(40)), [7, 8] * 50]


class TestTorchOnCuda(BackendConformance, backend="torch", device="cuda", dtype="float32"):
    """All that slotline expects of a backend."""

    @pytest.fixture
    def model(self, tiny_llama: Path) -> str:
        return str(tiny_llama)


def answers(driver, count: int = 16) -> list[list[int]]:
    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, max_tokens=count)
    steps = [driver.step(*(Work(row, len(prompt)) for row, prompt in enumerate(PROMPTS)))]
    steps += [driver.step(*(Work(row, 1) for row in range(len(PROMPTS)))) for _ in range(count - 1)]
    return [[int(step.tokens[row, 0]) for step in steps] for row in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "shape", [{}, {"num_key_value_heads": 1, "tie_word_embeddings": True}, {"attention_bias": True}]
)
def test_answers_are_those_of_the_cpu(tiny, load, shape):
    _, model = tiny(**shape)
    assert answers(load(model, device="cuda", dtype="float32")) == answers(load(model, device="cpu"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_close(tiny, load, dtype):
    _, model = tiny(initializer_range=0.1)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 97, 50)]
    scores = []
    for options in ({"device": "cuda", "dtype": dtype}, {"device": "cpu"}):
        driver = load(model, **options)
        driver.admit(0, prompt, prompt_logprobs=0)
        scores.append(driver.step(Work(0, 50)).prompt_logprobs.values)
    np.testing.assert_allclose(*scores, atol=0.1)


def test_company_and_chunks_change_no_bit(tiny, load):
    _, model = tiny()
    driver = load(model, device="cuda", deterministic=True)
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 97, 150)]

    def bits(result, row: int):
        i = result.rows.tolist().index(row)
        entry = result.logprobs.slice(i, i + 1)
        return int(result.tokens[i, 0]), entry.ids.tobytes(), entry.values.tobytes()

    driver.admit(0, prompt, logprobs=20)
    alone = [bits(driver.step(Work(0, 150)), 0)] + [bits(driver.step(Work(0, 1)), 0) for _ in range(5)]
    driver.end(0)
    for row in range(8):
        driver.admit(row, prompt[row:], logprobs=20)
    driver.step(Work(0, 33, sample=False), Work(1, 100, sample=False))
    driver.step(Work(1, 49, sample=False), Work(0, 1, sample=False), Work(2, 148, sample=False))
    for row in range(1, 8):
        driver.end(row)
        driver.admit(row, prompt[row:], logprobs=20)
    steps = [driver.step(*(Work(row, 150 - row) for row in range(1, 8)), Work(0, 116))]
    steps += [driver.step(*(Work(row, 1) for row in reversed(range(8)))) for _ in range(5)]
    assert [bits(step, 0) for step in steps] == alone
