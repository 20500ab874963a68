"""The torch backend on a CPU beside transformers' `generate`: SmolLM2-135M, the same float32 weights, greedy.

Three loads: one request alone; 8 at once with equal prompts' and answers' lengths; 8 at once with mixed ones, where
only tokens that were asked for count. Each engine runs with 1 and with 2 threads, all of them in turn, several times;
the best thread count of each is what is compared.

    python benchmarks/bench_cpu.py [--repeats 5] [--tokens 64] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from record import RESULTS, keep
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import slotline

TEXT = (
    "The tram climbs from the harbour past the old customs house, stops at the market where the fish is sold before "
    "sunrise, and ends at the reservoir. On Sundays the conductor rings the bell twice, once for the school and once "
    "for the baker, who left the town in the year of the flood and never came back. "
) * 8
GOALS = {"alone": 1.2, "equal8": 1.5, "mixed8": 1.5}  # times transformers' tokens per second


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: token ids of each prompt, and how many tokens each wants."""

    prompts: list[list[int]]
    tokens: list[int]


def loads(ids: list[int], tokens: int) -> dict[str, Load]:
    """Return the three loads."""
    lengths = [8, 16, 24, 48, 64, 96, 128, 192]
    wanted = [tokens * part // 8 for part in (2, 3, 5, 6, 9, 10, 13, 16)]
    return {
        "alone": Load([ids[:32]], [tokens]),
        "equal8": Load([ids[i : i + 32] for i in range(8)], [tokens] * 8),
        "mixed8": Load([ids[i : i + n] for i, n in enumerate(lengths)], wanted[::-1]),
    }


def as_transformers(model: slotline.model.Model) -> LlamaForCausalLM:
    """Return the weights as a transformers model."""
    c = model.checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
    )
    names = {"embed": "embed_tokens", "final_norm": "norm", "attn_norm": "input_layernorm"}
    names |= {"mlp_norm": "post_attention_layernorm"} | {n: f"self_attn.{n}_proj" for n in "qkvo"}
    names |= {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    state = {}
    for name in model.checkpoint.names():
        *prefix, part = name.split(".")
        state[".".join(["model", *prefix, names[part], "weight"])] = model.checkpoint.tensor(name)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf = LlamaForCausalLM(config).eval()
    hf.load_state_dict(state)
    hf.generation_config.eos_token_id = None  # every run has the same length
    hf.generation_config.pad_token_id = 0
    return hf


def run_transformers(hf: LlamaForCausalLM, load: Load) -> tuple[float, list[list[int]]]:
    """Return seconds and answers of one batch, padded on the left."""
    longest = max(map(len, load.prompts))
    ids = torch.zeros(len(load.prompts), longest, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for i, prompt in enumerate(load.prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        seen[i, longest - len(prompt) :] = 1
    began = time.perf_counter()
    with torch.inference_mode():
        out = hf.generate(ids, attention_mask=seen, max_new_tokens=max(load.tokens), do_sample=False)
    spent = time.perf_counter() - began
    return spent, [out[i, longest : longest + n].tolist() for i, n in enumerate(load.tokens)]


async def run_slotline(engine: slotline.Engine, load: Load) -> tuple[float, list[list[int]]]:
    """Return seconds and answers of requests sent at once."""
    params = [slotline.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in load.tokens]
    began = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(p, q) for p, q in zip(load.prompts, params, strict=True)))
    return time.perf_counter() - began, [list(d.token_ids) for d in done]


async def measure(repeats: int, tokens: int) -> list[dict[str, object]]:
    """Run everything in turn and return one row per load, engine and thread count."""
    async with AsyncExitStack() as stack:
        runners: dict[tuple[str, int], Callable[[Load], Awaitable[tuple[float, list[list[int]]]]]] = {}
        for threads in (1, 2):
            options = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": threads}
            engine = await stack.enter_async_context(
                # Without the prefix cache, which would answer every repetition's prompt for nothing.
                slotline.Engine.open(**options, max_slots=8, kv_cache_tokens=8192, prefix_caching=False)
            )
            runners["slotline", threads] = lambda load, engine=engine: run_slotline(engine, load)
        hf = as_transformers(engine.model)
        for threads in (1, 2):

            async def generate(load: Load, threads: int = threads) -> tuple[float, list[list[int]]]:
                torch.set_num_threads(threads)
                return run_transformers(hf, load)

            runners["transformers", threads] = generate
        return [
            row
            for name, load in loads(engine.encode(TEXT), tokens).items()
            for row in await turns(name, load, runners, repeats)
        ]


async def turns(name: str, load: Load, runners: dict, repeats: int) -> list[dict[str, object]]:
    """Time one load with every runner, the runners taking turns."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runners}
    answers = {}
    for repeat in range(repeats + 1):
        for key, run in runners.items():
            spent, answers[key] = await run(load)
            if repeat:  # the first one warms up
                seconds[key].append(spent)
    agree = sum(a == b for a, b in zip(answers["slotline", 1], answers["transformers", 1], strict=True))
    print(f"{name}: {agree} of {len(load.prompts)} answers are the same tokens", flush=True)
    wanted = sum(load.tokens)
    return [
        {
            "bench": "cpu",
            "load": name,
            "engine": engine,
            "threads": threads,
            "tokens": wanted,
            "tok_s": round(wanted / statistics.median(runs), 1),
            "runs_s": [round(run, 3) for run in runs],
            "same_answers": agree,
        }
        for (engine, threads), runs in seconds.items()
    ]


def best(rows: list[dict], load: str, engine: str) -> dict:
    """Return the row of the better thread count."""
    return max((r for r in rows if r["load"] == load and r["engine"] == engine), key=lambda r: r["tok_s"])


def report(rows: list[dict]) -> None:
    """Print the table and one JSON line per row."""
    print(f"\n{'load':8} {'slotline tok/s':>20} {'transformers tok/s':>20} {'ratio':>7} {'goal':>6}")
    for load, goal in GOALS.items():
        ours, theirs = best(rows, load, "slotline"), best(rows, load, "transformers")
        cells = [f"{r['tok_s']} ({r['threads']} thr)" for r in (ours, theirs)]
        print(f"{load:8} {cells[0]:>20} {cells[1]:>20} {ours['tok_s'] / theirs['tok_s']:>7.2f} {goal:>6}")
    for row in rows:
        print("ROW " + json.dumps(row))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    rows = asyncio.run(measure(options.repeats, options.tokens))
    report(rows)
    keep(rows, "cpu", options.out)


if __name__ == "__main__":
    main()
