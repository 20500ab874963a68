"""Time the microkernel alone: the echo backend, 256 rows, one token each a step.

What counts is the CPU time of the event loop's thread (schedule, commit, detokenise, put, and
asyncio itself), not the echo backend's own thread. Without consumers nobody reads; with
consumers one task a row counts what it gets.

    python benchmarks/bench_microkernel.py [--rows 256] [--steps 400] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from record import keep

import slotline


async def measure(rows: int, steps: int, *, consumers: bool) -> float:
    """Return CPU milliseconds of the loop's thread per step."""
    params = slotline.SamplingParams(max_tokens=steps, ignore_eos=True)
    async with slotline.Engine.open(
        "echo", backend="echo", max_slots=rows, kv_cache_tokens=rows * (steps + 64)
    ) as engine:
        handles = [await engine.submit([f"row {i:04d} says this again and again"], params) for i in range(rows)]
        counts = [0] * rows

        async def count(i: int) -> None:
            async for output in handles[i]:
                counts[i] += len(output.token_ids)

        while engine.stats().generated_tokens < rows:  # every row is past its prompt
            await asyncio.sleep(0)
        if consumers:
            tasks = [asyncio.create_task(count(i)) for i in range(rows)]
        began, first = time.thread_time(), engine.stats().steps
        while engine.stats().running == rows:
            await asyncio.sleep(0.005)
        spent, last = time.thread_time() - began, engine.stats().steps
        if consumers:
            await asyncio.gather(*tasks)
            assert counts == [steps] * rows, "a consumer missed tokens"
        return spent / (last - first) * 1e3


def main() -> None:
    """Print both figures and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    row = {"bench": "microkernel", "rows": options.rows, "steps": options.steps}
    for name, consumers, limit in (("alone", False, 1.0), ("consumers", True, 3.0)):
        runs = [asyncio.run(measure(options.rows, options.steps, consumers=consumers)) for _ in range(options.repeats)]
        row[f"{name}_ms"] = round(statistics.median(runs), 3)
        row[f"{name}_runs_ms"] = [round(r, 3) for r in runs]
        print(f"microkernel, {options.rows} rows, {name}: {row[f'{name}_ms']} ms a step (at most {limit})")
    print("ROW " + json.dumps(row))
    keep([row], "microkernel")


if __name__ == "__main__":
    main()
