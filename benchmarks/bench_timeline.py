"""Where the time of a decoding step goes: on the device, on the host, and in between.

For each number of rows, requests with prompts of 512 tokens decode together; what is counted are the steps from the one
after the last prompt to the first answer's end. Per step, in milliseconds: `wall` from one result to the next, `device`
on the device, `gap` what is left of the wall, `host` to schedule and commit (beside the device's work where steps are
launched ahead).

    python benchmarks/bench_timeline.py MODEL [--backend triton] [--rows 1 8 64 256] [--tokens 129] [--repeats 3]
        [--deterministic] [--out DIR]
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

PROMPT = 512


async def measure(engine: Any, rows: int, tokens: int) -> dict[str, float]:
    """Return milliseconds a step by use."""
    params = slotline.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    vocab = engine.info.vocab_size
    prompts = [[(7 * row + 31 * at) % (vocab - 200) + 100 for at in range(PROMPT)] for row in range(rows)]
    began: list[tuple[float, Any]] = []
    ended: list[tuple[float, Any]] = []
    first = 0

    async def one(prompt: list[int]) -> None:
        nonlocal first
        got = 0
        async for output in engine.stream(prompt, params):
            first += got == 0
            got += len(output.token_ids)
            if first == rows and not began:
                began.append((time.perf_counter(), engine.stats()))
            if output.finish_reason is not None and not ended:
                ended.append((time.perf_counter(), engine.stats()))

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    (start, before), (stop, after) = began[0], ended[0]
    steps = after.steps - before.steps
    wall = (stop - start) / steps * 1e3
    device = (after.device_seconds - before.device_seconds) / steps * 1e3
    host = (after.host_seconds - before.host_seconds) / steps * 1e3
    return {"steps": steps, "wall": wall, "device": device, "gap": max(wall - device, 0.0), "host": host}


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every number of rows."""
    found = []
    config = {"max_slots": max(options.rows), "prefix_caching": False, "deterministic": options.deterministic}
    async with slotline.Engine.open(options.model, backend=options.backend, **config) as engine:
        for rows in options.rows:
            await measure(engine, rows, 4)
            runs = [await measure(engine, rows, options.tokens) for _ in range(options.repeats)]
            row: dict[str, Any] = {"bench": "timeline", "model": Path(options.model).name, "rows": rows}
            row["deterministic"] = options.deterministic
            row |= {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
            found.append(row)
            print(
                "{rows:4} rows: wall {wall:.3f}  device {device:.3f}  gap {gap:.3f}  host {host:.3f} ms".format(**row)
            )
    return found


def main() -> None:
    """Print a line for each number of rows, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="to see what that mode costs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    for row in rows:
        print("ROW " + json.dumps(row))
    keep(rows, "timeline", options.out)


if __name__ == "__main__":
    main()
