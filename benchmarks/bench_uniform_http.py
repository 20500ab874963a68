"""Measure what HTTP takes from a model's throughput: the uniform workload through `slotline serve`, and without it.

256 streamed completions at once, prompts and answers of 100 to 1,024 tokens, temperature 0.6, top_p 0.95, top_k 50.
The same requests then go to an engine in a process of its own. Prints output tokens a second of both.

    python benchmarks/bench_uniform_http.py MODEL [--backend auto] [--requests 256] [--repeats 3] [--api-workers 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvloop
from bench_http import Connection, post
from record import keep

import slotline

SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 50, "ignore_eos": True}
ENGINE = {"max_slots": 256, "max_queue": 4096, "prefix_caching": False}
Requests = list[tuple[list[int], int]]


def requests(count: int, vocab: int) -> Requests:
    """Return prompts as token ids, and lengths of answers."""
    rng = random.Random(0)
    low, high = min(100, vocab // 4), vocab - min(100, vocab // 4)
    return [
        ([rng.randrange(low, high) for _ in range(rng.randint(100, 1024))], rng.randint(100, 1024))
        for _ in range(count)
    ]


async def over_http(port: int, bodies: list[bytes]) -> float:
    """Return the seconds until all are answered."""
    loop, began = asyncio.get_running_loop(), time.perf_counter()

    def client(data: bytes) -> Connection:
        return Connection(data, b"data: [DONE]", b"data: {", again=False)

    clients = [(await loop.create_connection(lambda data=data: client(data), "127.0.0.1", port))[1] for data in bodies]
    for each in clients:
        await each.over
    took = time.perf_counter() - began
    if not all(each.answers == 1 for each in clients):
        raise SystemExit("an answer is not whole")
    return took


async def in_process(model: str, backend: str, work: Requests, repeats: int) -> list[float]:
    """Return the seconds that an engine takes which is read where it runs."""

    async def one(engine: slotline.Engine, prompt: list[int], tokens: int) -> None:
        async for _ in engine.stream(prompt, slotline.SamplingParams(max_tokens=tokens, **SAMPLING)):
            pass

    found = []
    async with slotline.Engine.open(model, backend=backend, **ENGINE) as engine:
        for number in range(repeats + 1):
            began = time.perf_counter()
            await asyncio.gather(*(one(engine, *each) for each in (work if number else work[:8])))
            found.append(time.perf_counter() - began)
    return found[1:]  # the first one warmed up


def served(options: argparse.Namespace, work: Requests) -> list[float]:
    """Return the seconds that a server takes."""
    command = [sys.executable, "-P", "-m", "slotline", "serve", options.model, "--backend", options.backend]
    command += ["--port", "0", "--api-workers", str(options.api_workers), "--no-prefix-caching"]
    command += ["--max-slots", "256", "--max-queue", "4096", "--served-model-name", "m"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(re.search(r"http://[^:]+:(\d+)", server.stdout.readline())[1])
        common = {"model": "m", "stream": True, **SAMPLING}
        bodies = [post({"prompt": prompt, "max_tokens": tokens, **common}) for prompt, tokens in work]
        uvloop.run(over_http(port, bodies[:8]))
        return [uvloop.run(over_http(port, bodies)) for _ in range(options.repeats)]
    finally:
        server.terminate()
        server.wait(timeout=60)


def main() -> None:
    """Print a line a way, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with config.json, or echo")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--api-workers", type=int, default=0)
    options = parser.parse_args()
    config = Path(options.model) / "config.json"
    work = requests(options.requests, json.loads(config.read_text())["vocab_size"] if config.exists() else 256)
    tokens = sum(length for _, length in work)
    rows = []
    for way, seconds in (
        ("http", served(options, work)),
        ("in process", uvloop.run(in_process(options.model, options.backend, work, options.repeats))),
    ):
        rows += [
            {"way": way, "seconds": round(each, 3), "tokens_per_second": round(tokens / each, 1)} for each in seconds
        ]
        print(f"{way}: {tokens / statistics.median(seconds):,.0f} tokens/s; runs {[round(s, 3) for s in seconds]} s")
    keep(rows, "uniform-http")


if __name__ == "__main__":
    main()
