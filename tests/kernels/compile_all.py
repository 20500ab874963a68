"""Compile, for a GPU that need not be there, every kernel that the Triton backend launches. Nothing is computed.

The backend is loaded on the CPU with a driver that only names a target, and all its steps are gone through: each launch
compiles its kernel with the arguments that it would run with, down to machine code. What the interpreter lets pass and
a compiler does not comes out here. Then requests of all kinds must not need one variant more: a server would stand
still for it. Run by `test_compiles`; prints how many variants there were.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import slotline
from slotline.kernels import dependent, launch
from slotline.manager import PluginManager
from slotline.plugins.triton_backend import graphs, warmup
from slotline.plugins.triton_backend import tune as tuner
from slotline.plugins.triton_backend.backend import TritonBackend
from slotline.plugins.triton_backend.sampling import Kind
from slotline.plugins.triton_backend.tuning import Choices, Other, Product, Tuning, Use
from slotline.testing import write_tiny_llama

CAPABILITY = int(sys.argv[1])


class Target:
    """A driver that knows for what to compile, and no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launching(wanted: bool, device: torch.device) -> dict[str, Any]:
    return {"DEPENDENT": True, "launch_pdl": True} if wanted and CAPABILITY >= 90 else {"DEPENDENT": False}


def stand_in() -> None:
    """Let launches compile only, and memory that they would have written be zero."""
    triton.runtime.driver.set_active(Target())
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    for module in list(sys.modules.values()):
        if getattr(module, "launching", None) is dependent.launching:
            module.launching = launching


class Tuned(dict[Product, Choices]):
    """A table that has every product computed in tiles, in other ones for each number of rows."""

    def get(self, product: Product, default: Any = None) -> Any:
        if CAPABILITY < 90:
            return default
        tiles = {Use.GATED: tuner.GATED, Use.NORMED: tuner.PARTED}.get(product.use, tuner.PLAIN)
        return [(2, Other.FEW), *((8 * (number + 1), tile) for number, tile in enumerate(tiles))]


def tuned(device: str, folders: Any = ()) -> Tuning:
    table = Tuning()
    table._measured = Tuned()
    return table


def go_through(dtype: str, deterministic: bool, **config: Any) -> None:
    """Load a model and take every step that the backend has."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_llama(Path(name), hidden_size=1024, num_attention_heads=8, num_hidden_layers=1, **config)
        options = slotline.EngineConfig(
            model=str(folder), backend="triton", dtype=dtype, deterministic=deterministic, max_slots=17,
            kv_cache_tokens=2048, max_batch_tokens=256,
        )  # fmt: skip
        manager = PluginManager("")
        backend = TritonBackend()
        backend.load(options, manager.hook.slotline_open_model(config=options, manager=manager))
    runner = backend._loaded()
    steps = runner._graphs
    with torch.inference_mode():
        for kind in Kind:
            for size in steps.decode_sizes:
                steps.step(size, kind)
            for size in steps.sample_sizes:
                steps.draw(size, kind)
        for size in steps.token_sizes:
            steps.forward(size)
        for size in steps.whole_sizes:
            steps.whole(size)
        runner._decoder._weights.compile_products(256, 256)
        warmup.warm_up(runner, slots=17, longest=400, batch_tokens=256, blocks=20)
        before, known = launch.compiled(), variants()
        serve(runner)
        assert launch.compiled() == before, f"compiled while serving: {variants() - known}"


def variants() -> set[tuple[str, str]]:
    """Return what was compiled: names of kernels and what they were specialised for."""
    kernels = [kernel for kernel in launch._KERNELS if getattr(kernel, "device_caches", None)]
    return {(k.__name__, str(key)) for k in kernels for cache in k.device_caches.values() for key in cache[0]}


def serve(runner: Any) -> None:
    """Run steps of many sizes with requests of all kinds."""
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 1.1, "seed": 2, "min_p": 0.05, "logprobs": 2, "logprobs_mode": "processed"},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 40},
        {"temperature": 0.7, "seed": 3, "logit_bias": {5: 1.5}, "min_tokens": 2, "stop_token_ids": [7]},
        {"temperature": 0, "prompt_logprobs": 2},
    ]
    for rows in (1, 2, 3, 5, 8, 12, 16, 17, 1, 4):
        lengths = [rng.randint(1, 60) for _ in range(rows)]
        setups = [warmup._setup(slot, length, **rng.choice(kinds)) for slot, length in enumerate(lengths)]
        warmup._run(runner, setups, [0] * rows, admitted=setups)
        warmup._run(runner, setups, lengths, counts=[1] * rows)
        chosen = setups[:: rng.choice((1, 2, 3))]
        starts = [len(setup.token_ids) + 1 for setup in chosen]
        warmup._run(runner, chosen, starts, counts=[1] * len(chosen))
    for length in (65, 100, 128):  # whole prompts, recorded where library attention may take them
        alone = warmup._setup(0, length)
        warmup._run(runner, [alone], [0], admitted=[alone])
    runner.rows.release(range(17))


Tuning.of = staticmethod(tuned)  # type: ignore[assignment,method-assign]
graphs.FEW_ROWS, graphs.FEW_TOKENS, graphs.FEW_WHOLES = (1, 2, 16), (64,), (128,)
stand_in()
go_through("bfloat16", False)
go_through("float16", True)
go_through("float32", False, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=96)
print("compiled", launch.compiled())
