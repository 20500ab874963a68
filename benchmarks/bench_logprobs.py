"""What logprobs cost: throughput without them and with 0, 5 and 20 alternatives a token, values read.

SmolLM2-135M, 8 requests in 8 slots. Each width runs in turn with a run without logprobs, which pairs them;
the ratio is the median over pairs. Runs on a CPU (float32, one thread) or, where there is one, on a GPU.

    python benchmarks/bench_logprobs.py [--pairs 10] [--tokens 48] [--slots 8] [--model smollm2-135m] [--backend auto]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from record import keep

import slotline

WIDTHS = (0, 5, 20)
GOALS = {5: 0.95}  # of the throughput without logprobs
PROMPT = "The tram climbs from the harbour past the old customs house and stops at the market number"


async def run(engine: slotline.Engine, slots: int, tokens: int, width: int | None) -> float:
    """Return tokens per second of ``slots`` requests sent at once, every value read."""
    params = slotline.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=width)

    async def one(i: int) -> int:
        read = 0
        async for piece in engine.stream(f"{PROMPT} {i}", params):
            if piece.logprobs is not None:
                read += sum(len(row) for row in piece.logprobs)
        return read

    began = time.perf_counter()
    read = await asyncio.gather(*(one(i) for i in range(slots)))
    spent = time.perf_counter() - began
    assert width is None or min(read) >= tokens * max(width, 1), "values are missing"
    return slots * tokens / spent


async def measure(options: argparse.Namespace) -> list[dict]:
    """Return one row per width."""
    config = {"max_slots": options.slots, "kv_cache_tokens": options.slots * (options.tokens + 64)}
    if options.backend != "triton":
        config |= {"threads": 1}
    async with slotline.Engine.open(options.model, backend=options.backend, prefix_caching=False, **config) as engine:
        for width in (None, *WIDTHS):
            await run(engine, options.slots, options.tokens, width)
        pairs: dict[int, list[tuple[float, float]]] = {width: [] for width in WIDTHS}
        for i in range(options.pairs):
            for width in WIDTHS:
                order = (None, width) if i % 2 else (width, None)  # neither is always first
                speeds = {w: await run(engine, options.slots, options.tokens, w) for w in order}
                pairs[width].append((speeds[None], speeds[width]))
    return [summarise(width, found, options) for width, found in pairs.items()]


def summarise(width: int, found: list[tuple[float, float]], options: argparse.Namespace) -> dict:
    """Return medians of the pairs of one width."""
    return {
        "bench": "logprobs",
        "model": options.model,
        "backend": options.backend,
        "slots": options.slots,
        "width": width,
        "without_tok_s": round(statistics.median(a for a, _ in found), 1),
        "with_tok_s": round(statistics.median(b for _, b in found), 1),
        "ratio": round(statistics.median(b / a for a, b in found), 3),
        "pairs_tok_s": [[round(a, 1), round(b, 1)] for a, b in found],
    }


def main() -> None:
    """Print a table and rows, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    for row in rows:
        goal = f" (at least {GOALS[row['width']]})" if row["width"] in GOALS else ""
        speeds = f"{row['with_tok_s']} of {row['without_tok_s']} tok/s"
        print(f"logprobs={row['width']}: {speeds}, ratio {row['ratio']}{goal}")
    for row in rows:
        print("ROW " + json.dumps(row))
    keep(rows, "logprobs")


if __name__ == "__main__":
    main()
