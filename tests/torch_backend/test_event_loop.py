"""The event loop's thread does no work with tensors: all of it belongs to the backend's thread."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import slotline

pytest_plugins = ["slotline.testing"]


class Seen(TorchDispatchMode):
    """Record the operators that run on the thread that entered it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_operator_on_this_thread_is_seen_and_one_elsewhere_is_not():
    with Seen() as seen:
        thread = threading.Thread(target=lambda: torch.ones(2).sum())
        thread.start()
        thread.join()
        assert seen.operators == []
        torch.ones(2).sum()
    assert seen.operators


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"deterministic": True}])
async def test_no_operator_runs_on_the_event_loop(tiny_llama: Path, options):
    params = [
        slotline.SamplingParams(temperature=0, max_tokens=8),
        slotline.SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, logprobs=5),
        slotline.SamplingParams(temperature=0.7, repetition_penalty=1.2, logit_bias={5: 2.0}, max_tokens=8, n=2),
        slotline.SamplingParams(temperature=0, min_tokens=4, max_tokens=8, prompt_logprobs=3),
    ]
    with Seen() as seen:
        async with slotline.Engine.open(
            str(tiny_llama), backend="torch", device="cpu", max_slots=3, kv_cache_tokens=2048, **options
        ) as engine:
            done = await asyncio.gather(*(engine.generate([1, 2, 3 + i], p) for i, p in enumerate(params)))
            await engine.score([[1, 2, 3, 4]])
            streamed = [piece async for piece in engine.stream([7, 8], params[0])]
    assert len(done) == 4 and streamed
    assert seen.operators == []
