"""Half an hour of everything at once: answers stay right, memory of every process stays flat.

``SLOTLINE_SOAK_MINUTES`` makes it shorter. What was measured is kept in benchmarks/results.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

MINUTES = float(os.environ.get("SLOTLINE_SOAK_MINUTES", "30"))
CLIENTS = 24
EVERY = 5.0  # seconds between two looks at the memory
GROWTH = 8 * 2**20  # bytes that a process may have more at the end than after the first fifth
RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "record.py"

TEXTS = ("abc", "a longer prompt that repeats itself, " * 20, "ü-ñ-漢-🙂 ", "x" * 3000)


async def visit(client: httpx.AsyncClient, dice: random.Random, seen: Counter) -> None:
    """Do one of the things that clients do, and check what comes back."""
    text, tokens = dice.choice(TEXTS), dice.randint(1, 200)
    body = {"model": "echo", "prompt": text, "max_tokens": tokens, "ignore_eos": True}
    kind = dice.choices(("whole", "stream", "leave", "wrong", "many", "metrics"), (4, 4, 2, 1, 1, 0.2))[0]
    seen[kind] += 1
    wanted = (text * (1 + 200 // len(text))).encode()[:tokens].decode(errors="replace")
    if kind == "metrics":
        assert "slotline:kv_blocks" in (await client.get("/metrics")).text
    elif kind == "wrong":
        reply = await client.post("/v1/completions", json={**body, "temperature": "hot", "x": 1})
        assert reply.status_code == 400
    elif kind in ("whole", "many"):
        reply = await client.post("/v1/completions", json={**body, "n": 3 if kind == "many" else 1})
        assert reply.status_code in (200, 503), reply.text
        seen[reply.status_code] += 1
        if reply.status_code == 200:
            assert all(choice["text"] == wanted for choice in reply.json()["choices"])
    else:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            seen[reply.status_code] += 1
            shown = ""
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    shown += json.loads(line[6:])["choices"][0]["text"]
                    if kind == "leave" and len(shown) > tokens // 2:
                        return
            assert reply.status_code == 503 or shown == wanted or kind == "leave"


def flat(samples: list[int]) -> int:
    """Return how much more memory there is at the end than after a fifth, both as medians of a tenth."""
    tenth = max(1, len(samples) // 10)
    return int(statistics.median(samples[-tenth:]) - statistics.median(samples[2 * tenth : 3 * tenth]))


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 300)
@pytest.mark.parametrize("workers", [0, 2])
async def test_soak(serve, workers):
    options = ["--api-workers", str(workers), "--max-slots", "16", "--max-queue", "32", "--echo-delay", "0.001"]
    seen: Counter = Counter()
    with serve(*options, "--kv-cache-tokens", "65536") as server:
        end = time.monotonic() + MINUTES * 60 / 2  # of each of the two
        memory: dict[int, list[int]] = {process.pid: [] for process in server.tree}

        async def client_of(number: int) -> None:
            dice = random.Random(number)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                while time.monotonic() < end:
                    await visit(client, dice, seen)

        async def look() -> None:
            while time.monotonic() < end:
                for pid, samples in memory.items():
                    samples.append(psutil.Process(pid).memory_info().rss)
                await asyncio.sleep(EVERY)

        await asyncio.gather(look(), *(client_of(number) for number in range(CLIENTS)))
        after = server.at_rest()
        files = [process.num_fds() for process in server.tree]
        assert server.stop() == 0
    ended = sum(after[f"requests_finished_total:{reason}"] for reason in ("stop", "length", "abort", "error"))
    grown = {str(i): flat(samples) for i, samples in enumerate(memory.values())}
    row = {
        "bench": "soak",
        "minutes": MINUTES / 2,
        "workers": workers,
        "visits": {str(kind): count for kind, count in seen.items()},
        "choices_ended": ended,
        "tokens": after["generation_tokens_total"],
        "open_files": files,
        "rss_bytes": {str(i): samples for i, samples in enumerate(memory.values())},
        "grown_bytes": grown,
    }
    _keep(row)
    assert after["requests_finished_total:error"] == 0 and after["backend_restarts_total"] == 0
    assert max(grown.values()) < GROWTH, grown
    assert max(files) < 100, "connections are left open"


def _keep(row: dict) -> None:
    spec = importlib.util.spec_from_file_location("record", RECORD)
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    record.keep([row], f"soak-{row['workers']}")
