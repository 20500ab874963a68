"""Measure `slotline serve` over HTTP with the echo backend, from a load generator in a process of its own.

Loads: `sse`, server-sent events of one token each over 64 streams (counted as events: a server that
joins tokens has fewer); `whole`, requests of 16 tokens that are not streamed, over 64 connections;
`first`, the time to the first chunk of a new request while 64 streams run at 100 tokens a second, each at
its own pace. `alone` times the same with no HTTP: the engine in a process where the streams are read
directly. HTTP's share is the difference.

In `lockstep` the 64 streams share steps of 10 ms. A new request joins the step after the one that runs, so
its first token is 15 ms away on average, in any server.

The server has one core and the generator another, where the system lets processes be pinned.

    python benchmarks/bench_http.py [--workers 0,2] [--loads sse,whole] [--seconds 8] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

import psutil
import uvloop
from record import keep

import slotline

STREAMS = 64
TOKENS = 4000  # of a stream; it begins again when it ends
PROBES = 200
RATE = {"echo_rate": 100.0, "pipeline_depth": 1}
STEPS = {"echo_delay": 0.01, "pipeline_depth": 1}
PACED = {"first": (64, RATE), "alone": (64, RATE), "lockstep": (64, STEPS)}  # streams, and options of the engine
AIMS = {"sse": ">= 20000", "whole": ">= 1500", "first": "< 5", "lockstep": "none", "alone": "none"}


def request(tokens: int, *, stream: bool, prompt: str = "a prompt of forty characters, more or less") -> bytes:
    """Return a whole request."""
    return post({"model": "echo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream})


def post(body: dict) -> bytes:
    """Return a body with its head."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Connection(asyncio.Protocol):
    """A client that asks again whenever an answer ends."""

    def __init__(self, data: bytes, end: bytes, mark: bytes, *, again: bool = True) -> None:
        self.seen = self.answers = 0
        self.over = asyncio.get_running_loop().create_future()
        self._data, self._end, self._mark, self._again = data, end, mark, again
        self._tail = b""
        self.first = 0.0

    def connection_made(self, transport) -> None:
        self._transport = transport
        self.asked = time.perf_counter()
        transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        seen = data.count(self._mark)
        if seen and not self.first:
            self.first = time.perf_counter() - self.asked
        self.seen += seen
        tail = self._tail + data[-64:]
        self._tail = tail[-len(self._end) + 1 :]
        if self._end in tail:
            self.answers += 1
            self._tail = b""
            if self._again:
                self._transport.write(self._data)
            else:
                self._transport.close()

    def connection_lost(self, error) -> None:
        if not self.over.done():
            self.over.set_result(error)

    def close(self) -> None:
        self._transport.abort()


class Whole(Connection):
    """A client of answers that are not streamed: each ends with its usage."""

    def data_received(self, data: bytes) -> None:
        self.answers += data.count(b'"prompt_tokens_details"')
        if data.endswith(b"}}}"):
            self._transport.write(self._data)


async def connect(port: int, kind, *args, **options):
    return (await asyncio.get_running_loop().create_connection(lambda: kind(*args, **options), "127.0.0.1", port))[1]


async def rate(port: int, seconds: float, clients: list, count) -> dict:
    """Return how fast a count grows, and what CPU time that took."""
    await asyncio.sleep(1.0)  # until all streams run
    before, began = sum(map(count, clients)), time.perf_counter()
    await asyncio.sleep(seconds)
    grown, took = sum(map(count, clients)) - before, time.perf_counter() - began
    for client in clients:
        client.close()
    return {"per_second": round(grown / took, 1)}


async def sse(port: int, seconds: float) -> dict:
    """Count events a second."""
    data = request(TOKENS, stream=True)
    clients = [await connect(port, Connection, data, b"data: [DONE]", b"data: {") for _ in range(STREAMS)]
    return await rate(port, seconds, clients, lambda client: client.seen)


async def whole(port: int, seconds: float) -> dict:
    """Count answers a second."""
    clients = [await connect(port, Whole, request(16, stream=False), b"", b"") for _ in range(STREAMS)]
    return await rate(port, seconds, clients, lambda client: client.answers)


async def first(port: int, streams: int) -> dict:
    """Time the first chunk of new requests beside streams at a steady pace."""
    data = request(30_000, stream=True)
    clients = [await connect(port, Connection, data, b"data: [DONE]", b"data: {") for _ in range(streams)]
    while min(client.seen for client in clients) < 5:
        await asyncio.sleep(0.05)
    times = []
    probe = request(1, stream=True, prompt="abc")
    began, before = time.perf_counter(), sum(client.seen for client in clients)
    while len(times) < PROBES:
        client = await connect(port, Connection, probe, b"data: [DONE]", b"data: {", again=False)
        await client.over
        times.append(client.first * 1e3)
        await asyncio.sleep(0.0137 * (1 + len(times) % 3))  # at any moment of a step
    took = time.perf_counter() - began
    pace = (sum(client.seen for client in clients) - before) / streams / took
    for client in clients:
        client.close()
    return {**quantiles(times), "tokens_per_second_and_stream": round(pace, 1)}


async def alone() -> dict:
    """Time the first tokens of new requests in an engine without HTTP, read in its own process."""
    streams, options = PACED["alone"]
    async with slotline.Engine.open("echo", backend="echo", max_slots=128, **options) as engine:
        prompt = "a prompt of forty characters, more or less"
        long = slotline.SamplingParams(max_tokens=30_000, ignore_eos=True)

        async def read() -> None:
            async for _ in engine.stream(prompt, long):
                pass

        readers = [asyncio.create_task(read()) for _ in range(streams)]
        times = []
        while len(times) < PROBES:
            await asyncio.sleep(0.0137 * (1 + len(times) % 3))
            began = time.perf_counter()
            await engine.generate("abc", slotline.SamplingParams(max_tokens=1))
            times.append((time.perf_counter() - began) * 1e3)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return quantiles(times)


def quantiles(times: list[float]) -> dict:
    """Return the median, and the slow ones."""
    ordered = sorted(times)
    return {f"p{p}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 90, 99)}


class Server:
    """`slotline serve` on a core of its own."""

    def __init__(self, workers: int, cores: list[int], *options: str) -> None:
        command = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0"]
        command += ["--max-slots", "128", "--api-workers", str(workers), *options]
        self.process = subprocess.Popen(pinned(cores) + command, stdout=subprocess.PIPE, text=True)
        self.port = int(re.search(r"http://[^:]+:(\d+)", self.process.stdout.readline())[1])

    def cpu_seconds(self) -> float:
        own = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        self.process.terminate()
        if self.process.wait(timeout=60):
            raise SystemExit(f"the server ended with {self.process.returncode}")


def pinned(cores: list[int]) -> list[str]:
    """Return what a command is begun with to have these cores only."""
    return ["taskset", "-c", ",".join(map(str, cores))] if cores else []


def one(load: str, workers: int, seconds: float, *, pin: bool) -> dict:
    """Run one load once against a server of its own."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    apart = pin and len(cores) > 1 and shutil.which("taskset") is not None
    if load == "alone":
        return {"load": load, "workers": workers, **uvloop.run(alone()), "load_average": os.getloadavg()[0]}
    paced = PACED[load][1] if load in PACED else {}
    options = [word for name, value in paced.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    server = Server(workers, cores[:1] if apart and not workers else [], *options)
    try:
        command = [sys.executable, __file__, "--generate", load, "--port", str(server.port), "--seconds", str(seconds)]
        busy = server.cpu_seconds()
        began = time.perf_counter()
        command = pinned(cores[1:] if apart else []) + command
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took = time.perf_counter() - began
        row = {"load": load, "workers": workers, **json.loads(done.stdout)}
        row["server_cpu_share"] = round((server.cpu_seconds() - busy) / took, 3)
        row["load_average"] = os.getloadavg()[0]
        return row
    finally:
        server.stop()


def main() -> None:
    """Print a line a run, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="0,2", help="values of --api-workers")
    parser.add_argument("--loads", default="sse,whole,alone,first,lockstep")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-pin", action="store_true")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        load, port = options.generate, options.port
        work = (
            first(port, PACED[load][0]) if load in PACED else {"sse": sse, "whole": whole}[load](port, options.seconds)
        )
        print(json.dumps(uvloop.run(work)))
        return
    rows = []
    for load in options.loads.split(","):
        for workers in map(int, options.workers.split(",")):
            if load == "alone" and workers:
                continue  # it has none
            runs = [one(load, workers, options.seconds, pin=not options.no_pin) for _ in range(options.repeats)]
            rows += runs
            key = "p50_ms" if load in PACED else "per_second"
            middle = statistics.median(run[key] for run in runs)
            shown = [run[key] for run in runs]
            print(f"{load}, {workers} API workers: {key} {middle} (aim {AIMS[load]}); runs {shown}", flush=True)
    for row in rows:
        print("ROW " + json.dumps(row))
    keep(rows, "http")


if __name__ == "__main__":
    main()
