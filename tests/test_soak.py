"""Two hundred streaming clients of a real server, a third of whom vanish: nobody notices, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

TOPICS, THINGS = ("The river", "A clock", "Her letter"), ("sea", "war", "key")
PROMPTS = [f"{topic} and the {thing}" for topic in TOPICS for thing in THINGS]
TOKENS = 16
CLIENTS = 200
GROWTH = 50 * 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, psutil.Process]]:
    options = ["--deterministic", "--max-slots", "32", "--kv-cache-tokens", "8192", "--max-queue", "400"]
    command = [sys.executable, "-P", "-m", "slotline", "serve", "smollm2-135m", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield re.search(r"http://\S+", line)[0], psutil.Process(process.pid)
        process.terminate()
    assert process.returncode == 0


def body(prompt: str) -> dict[str, object]:
    return {
        "model": "smollm2-135m",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }


async def read(client: httpx.AsyncClient, prompt: str, events: int | None = None) -> str:
    """Return the streamed text, or leave after so many events."""
    text, seen = "", 0
    async with client.stream("POST", "/v1/completions", json=body(prompt)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            seen += 1
            if seen == events:
                return text
    return text


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the metrics by name, and by reason where they have one."""
    lines = (await client.get("/metrics")).text.splitlines()
    pattern = re.compile(r"(slotline:\w+)\{(?:finished_reason=\"(\w+)\",)?model_name=\"[^\"]*\"\} (\S+)$")
    found = map(pattern.match, lines)
    return {f"{m[1]}:{m[2]}" if m[2] else m[1]: float(m[3]) for m in found if m}


async def at_rest(client: httpx.AsyncClient) -> dict[str, float]:
    """Wait until nothing runs or waits, and return the metrics of that moment."""
    async with asyncio.timeout(60):
        while True:
            values = await gauges(client)
            if not values["slotline:num_requests_running"] and not values["slotline:num_requests_waiting"]:
                return values


@pytest.mark.timeout(600)
async def test_two_hundred_streams_a_third_of_which_vanish(server: tuple[str, psutil.Process]) -> None:
    url, process = server
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        alone = {prompt: await read(client, prompt) for prompt in PROMPTS}
        await asyncio.gather(*(read(client, PROMPTS[i % len(PROMPTS)]) for i in range(40)))  # every buffer is grown
        await at_rest(client)
        before = process.memory_info().rss

        async def one(i: int) -> str | None:
            prompt = PROMPTS[i % len(PROMPTS)]
            if i % 3 == 0:
                await read(client, prompt, events=1 + i % 5)
                return None
            return await read(client, prompt)

        texts = await asyncio.gather(*(one(i) for i in range(CLIENTS)))
        values = await at_rest(client)
        grown = process.memory_info().rss - before

    assert sum(text is None for text in texts) == 67
    for i, text in enumerate(texts):
        assert text is None or text == alone[PROMPTS[i % len(PROMPTS)]]
    assert values["slotline:kv_blocks_active"] == 0
    assert values["slotline:requests_finished_total:abort"] >= 60, "the clients that left were not noticed in time"
    assert grown < GROWTH, f"{grown / 2**20:.1f} MiB more than before"
