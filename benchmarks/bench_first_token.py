"""Time until the first token, of prompts of lengths that are new to the engine and of the same lengths again.

For each length, prompts that differ by a few tokens come one after the other, alone or two at a time, all of them
twice: `first` is the median of the first time, `again` that of the second. `device` is what of `again` the device says
it took. An engine that gets ready for a length when it meets it shows in `first` what its users would see every time.

    python benchmarks/bench_first_token.py MODEL [--backend triton] [--lengths 512 2500 8000] [--together 1 2]
        [--prompts 8] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from record import RESULTS, keep

import slotline

STEP = 7  # tokens by which lengths differ


async def first_token(engine: Any, lengths: list[int]) -> tuple[float, float]:
    """Return seconds until prompts of these lengths, sent at once, all have a token; and those of the device."""
    vocab = engine.info.vocab_size
    prompts = [[(31 * at + length) % (vocab - 200) + 100 for at in range(length)] for length in lengths]
    once = slotline.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    before, began = engine.stats().device_seconds, time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, once) for prompt in prompts))
    return time.perf_counter() - began, engine.stats().device_seconds - before


async def measure(engine: Any, length: int, together: int, prompts: int) -> dict[str, Any]:
    """Return milliseconds for a length."""
    groups = [[length - STEP * (together * number + one) for one in range(together)] for number in range(prompts)]
    first, again = [[await first_token(engine, group) for group in groups] for _ in range(2)]
    row: dict[str, Any] = {"length": length, "together": together}
    for name, values in (
        ("first", [wall for wall, _ in first]),
        ("again", [wall for wall, _ in again]),
        ("device", [device for _, device in again]),
    ):
        row[f"{name}_ms"] = round(statistics.median(values) * 1e3, 2)
    return row


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every length, alone and together."""
    found = []
    config = {"max_slots": 16, "prefix_caching": False, "max_model_len": max(options.lengths) + 16}
    async with slotline.Engine.open(options.model, backend=options.backend, **config) as engine:
        await first_token(engine, [16])
        for together in options.together:
            for length in options.lengths:
                row = {"bench": "first-token", "model": Path(options.model).name}
                row |= await measure(engine, length, together, options.prompts)
                found.append(row)
                print("ROW " + json.dumps(row), flush=True)
    return found


def main() -> None:
    """Print a line for each length, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2500, 8000])
    parser.add_argument("--together", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    keep(asyncio.run(run(options)), "first-token", options.out)


if __name__ == "__main__":
    main()
