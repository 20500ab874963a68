"""A real model on a GPU: its answers beside transformers, in float32 and in the same type, and the torch backend."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

import slotline
from slotline import SamplingParams

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
TYPES = ["bfloat16", "float16", "float32"]
NEAR = {"bfloat16": 0.3, "float16": 0.05, "float32": 1e-3}  # by how much a token may be behind the best one
ERROR = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-3}  # of logprobs, on average


@pytest.fixture(scope="module", params=TYPES)
async def answers(
    request: pytest.FixtureRequest, anyio_backend: str, mixed_prompts: list[str]
) -> tuple[str, list[Any]]:
    """Return a type, and what the triton backend answers in it: all prompts at once, twenty slots."""
    async with slotline.Engine.open(
        backend="triton", dtype=request.param, max_slots=20, kv_cache_tokens=32_768
    ) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in mixed_prompts))
        engine.check_integrity()
    return request.param, done


def judged(table: Any, answer: Any) -> tuple[float, list[float]]:
    """Return how far the first token that is not the reference's best is behind that, and the errors of all logprobs.

    Args:
        table: [64, V] the reference's logprobs along the answer.
    """
    chosen = torch.tensor(answer.token_ids)[:, None]
    own = table.gather(1, chosen)[:, 0]
    behind = table.max(1).values - own
    first = behind[behind > 0][:1].tolist()
    given = torch.tensor([next(iter(row.values())) for row in answer.logprobs])
    return (first[0] if first else 0.0), (own - given).abs().tolist()


def held(dtype: str, found: list[tuple[float, list[float]]]) -> None:
    """Fail where the differences are more than rounding of that type explains."""
    errors = [error for _, each in found for error in each]
    worst, mean = max(behind for behind, _ in found), sum(errors) / len(errors)
    print(f"{dtype}: {sum(not b for b, _ in found)} of {len(found)} equal, gap at most {worst:.3f}, error {mean:.5f}")
    assert worst <= NEAR[dtype] and mean <= ERROR[dtype]


@pytest.mark.parametrize("alike", [False, True], ids=["float32 on the CPU", "the same type on the GPU"])
def test_transformers(answers: tuple[str, list[Any]], smollm2_reference: Any, alike: bool) -> None:
    dtype, done = answers
    model = smollm2_reference
    if alike:
        model = copy.deepcopy(model).to("cuda", getattr(torch, dtype))
    found = []
    for answer in done:
        ids = torch.tensor([answer.prompt_token_ids + answer.token_ids], device=model.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1]
        found.append(judged(torch.log_softmax(logits.float(), -1).cpu(), answer))
    held(dtype, found)


async def test_the_torch_backend_on_the_gpu(answers: tuple[str, list[Any]]) -> None:
    """Its scores of the answers, as prompts: the token itself, and the best one."""
    dtype, done = answers
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    found = []
    async with slotline.Engine.open(
        backend="torch", device="cuda", dtype=dtype, max_slots=4, kv_cache_tokens=8192, prefix_caching=False
    ) as engine:
        for answer in done:
            scored = await engine.generate(answer.prompt_token_ids + answer.token_ids, asked)
            rows = list(scored.prompt_logprobs)[len(answer.prompt_token_ids) :]
            own = [next(iter(row.values())) for row in rows]
            given = [next(iter(row.values())) for row in answer.logprobs]
            behind = [max(row.values()) - value for row, value in zip(rows, own, strict=True)]
            first = next((gap for gap in behind if gap > 0), 0.0)
            found.append((first, [abs(a - b) for a, b in zip(own, given, strict=True)]))
    held(dtype, found)
