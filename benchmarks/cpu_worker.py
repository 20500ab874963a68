"""One engine of bench_cpu.py in a process of its own: thread pools of several in one process slow each other down.

Answers lines of stdin, {"prompts": [[ids]], "tokens": [counts]}, with lines {"seconds": s, "answers": [[ids]]}.

    python benchmarks/cpu_worker.py {fp32,int8,int4,transformers} THREADS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import slotline
from slotline.manager import PluginManager

Answers = list[list[int]]
Answer = Callable[[Answers, list[int]], Awaitable[tuple[float, Answers]]]


@asynccontextmanager
async def open_slotline(name: str, threads: int) -> AsyncIterator[Answer]:
    """Give what answers with slotline; ``name`` is a quantization, or fp32."""
    options = {"backend": "torch", "device": "cpu", "dtype": "float32", "threads": threads}
    options |= {"quantization": None if name == "fp32" else name, "max_slots": 32, "kv_cache_tokens": 4096}
    # The prefix cache would answer every repetition's prompts for nothing.
    async with slotline.Engine.open(**options, prefix_caching=False) as engine:

        async def answer(prompts: Answers, tokens: list[int]) -> tuple[float, Answers]:
            params = [slotline.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in tokens]
            began = time.perf_counter()
            done = await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))
            return time.perf_counter() - began, [list(d.token_ids) for d in done]

        yield answer


@asynccontextmanager
async def open_transformers(_name: str, threads: int) -> AsyncIterator[Answer]:
    """Give what answers with transformers."""
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    manager = PluginManager("")
    hf = as_transformers(manager.hook.slotline_open_model(config=slotline.EngineConfig(), manager=manager))

    async def answer(prompts: Answers, tokens: list[int]) -> tuple[float, Answers]:
        return run_transformers(hf, prompts, tokens)

    yield answer


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


def run_transformers(hf: LlamaForCausalLM, prompts: Answers, tokens: list[int]) -> tuple[float, Answers]:
    """Return seconds and answers of one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        seen[i, longest - len(prompt) :] = 1
    began = time.perf_counter()
    with torch.inference_mode():
        out = hf.generate(ids, attention_mask=seen, max_new_tokens=max(tokens), do_sample=False)
    spent = time.perf_counter() - began
    return spent, [out[i, longest : longest + n].tolist() for i, n in enumerate(tokens)]


async def work(name: str, threads: int) -> None:
    """Answer until stdin ends."""
    kind, version = open_slotline, slotline.__version__
    if name == "transformers":
        kind, version = open_transformers, transformers.__version__
    async with kind(name, threads) as answer:
        print(json.dumps({"version": version}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            seconds, answers = await answer(**json.loads(line))
            print(json.dumps({"seconds": seconds, "answers": answers}), flush=True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
