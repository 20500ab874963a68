"""The table of docs/reliability.md: what breaks, and what a server does about it.

Nothing that was accepted is lost, and nothing leaks; both are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

import slotline
from slotline.apis.cli.protocol import GuardedProtocol
from slotline.apis.cli.server import Server, ServerOptions
from slotline.apis.openai import create_app
from slotline.apis.openai.service import EngineLifespan, Settings
from slotline.hookspecs import hookimpl
from slotline.manager import PluginManager
from slotline.plugins.echo import EchoBackend

STORM = 500
IDLE = 4000
MEBIBYTE = 2**20


def fds(process: psutil.Process) -> int:
    return process.num_fds()


def until(done) -> None:
    """Look until something holds; a test's own time limit ends it otherwise."""
    while not done():
        time.sleep(0.01)


def read_all(wire: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := wire.recv(65536):
            data += part
    return data


@pytest.fixture
async def stack():
    async with contextlib.AsyncExitStack() as stack:
        yield stack


# Clients that leave, or do not read


@pytest.mark.timeout(100)
def test_a_storm_of_disconnects(serve):
    with serve("--max-slots", "64", "--max-queue", "1000", "--echo-delay", "0.002") as server:
        raw = server.raw(max_tokens=20_000, ignore_eos=True, stream=True)

        def visit(number: int) -> None:
            with server.connect() as wire:
                wire.sendall(raw)
                if number % 3:  # others leave before they have heard anything
                    assert wire.recv(12) == b"HTTP/1.1 200"

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(visit, range(100)))  # every buffer is grown
            server.at_rest()
            process, before = server.tree[0], server.metrics()
            rss, open_before = process.memory_info().rss, fds(process)
            list(pool.map(visit, range(STORM)))
        after = server.at_rest()
        assert after["requests_started_total"] == sum(
            after[f"requests_finished_total:{reason}"] for reason in ("stop", "length", "abort", "error")
        )
        begun = after["requests_started_total"] - before["requests_started_total"]
        assert after["requests_finished_total:abort"] - before["requests_finished_total:abort"] == begun
        assert begun >= STORM * 2 // 3
        until(lambda: fds(process) <= open_before)
        assert process.memory_info().rss - rss < 50 * MEBIBYTE
        assert len(server.log.splitlines()) < STORM
        assert server.post(prompt="abc").json()["choices"][0]["text"] == "abc"
        assert server.stop() == 0


@pytest.mark.timeout(60)
async def test_a_hang_up_aborts_within_two_steps(monkeypatch, stack):
    seen: dict[str, int] = {}

    class Watch:
        @hookimpl
        def slotline_observe_request(self, event):
            if event.kind == "finished":
                seen["aborted"] = engine.stats().steps
                ended.set()

    def lost(self, error):
        seen["lost"] = engine.stats().steps
        connection_lost(self, error)

    connection_lost, ended = GuardedProtocol.connection_lost, asyncio.Event()
    monkeypatch.setattr(GuardedProtocol, "connection_lost", lost)
    manager = PluginManager()
    manager.register(Watch(), "watch")
    body = {"model": "echo", "prompt": "abc", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    engine = await stack.enter_async_context(
        slotline.Engine.open("echo", backend="echo", echo_delay=0.002, manager=manager)
    )
    port = await stack.enter_async_context(running(engine))
    for _ in range(5):
        ended.clear()
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
        async with client, client.stream("POST", "/v1/completions", json=body) as reply:
            await anext(reply.aiter_lines())
        await ended.wait()
        assert 0 <= seen["aborted"] - seen["lost"] <= 2


@contextlib.asynccontextmanager
async def running(engine: slotline.Engine, **settings):
    """Serve an engine of this process on a port; yield the port."""

    class Open(EngineLifespan):
        @contextlib.asynccontextmanager
        async def open(self):
            yield engine

    listener = socket.create_server(("127.0.0.1", 0))
    options = ServerOptions(drain_timeout=0, settings=Settings(**settings))
    server = Server(lambda on_failure: Open(engine.config, background=True, on_failure=on_failure), options)
    opened = asyncio.Event()
    server.on_open(lambda _: opened.set())
    task = asyncio.ensure_future(server.serve([listener]))
    await opened.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await task


@pytest.mark.timeout(60)
def test_slow_readers_are_dropped_by_the_surface(serve):
    name = "m" * 2000  # in every event, so that buffers are full soon
    options = ["--write-timeout", "0.5", "--served-model-name", name, "--max-slots", "16"]
    with serve(*options) as server:
        process, wires = server.tree[0], []
        server.post(model=name, prompt="abc")
        base = fds(process)
        raw = server.raw(model=name, max_tokens=30_000, ignore_eos=True, stream=True)
        for _ in range(4):
            wire = socket.socket()
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(("127.0.0.1", server.port))
            wire.sendall(raw)
            wires.append(wire)
        good = server.post(model=name, prompt="abc", max_tokens=300, ignore_eos=True)
        assert good.json()["choices"][0]["text"] == "abc" * 100
        server_metrics = server.at_rest()
        assert server_metrics["requests_finished_total:abort"] == 4
        assert server_metrics["generation_tokens_total"] < 4 * 30_000  # the core was told, it did not run on
        until(lambda: fds(process) <= base)  # though the clients still hold their ends
        assert server.log.count("read nothing for 0.5 s") == 4 and "Traceback" not in server.log
        for wire in wires:
            wire.close()
        assert server.stop() == 0


async def test_the_core_never_aborts_a_slow_reader():
    """A request that nobody reads runs to its end, and its whole answer waits."""
    async with slotline.Engine.open("echo", backend="echo") as engine:
        handle = await engine.submit(["abc"], slotline.SamplingParams(max_tokens=3000, ignore_eos=True))
        while not handle.finished:
            await asyncio.sleep(0)
        assert (await handle.completions())[0].text == "abc" * 1000


# The engine fails


async def test_a_step_that_raises(monkeypatch):
    """Those in it fail by name, those that wait are answered, and nothing is left."""
    broken = threading.Event()
    launch = EchoBackend.launch

    def fail_once(self, plan):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("injected")
        return launch(self, plan)

    monkeypatch.setattr(EchoBackend, "launch", fail_once)
    async with slotline.Engine.open("echo", backend="echo", max_slots=4, echo_delay=0.002) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "echo", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
            asked = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(12)]
            while engine.stats().generated_tokens < 8:
                await asyncio.sleep(0)
            broken.set()
            replies = await asyncio.gather(*asked)
        counts = Counter(reply.status_code for reply in replies)
        assert counts == {500: 4, 200: 8}
        for reply in replies:
            if reply.status_code == 500:
                assert reply.json()["error"]["code"] == "step_failed" and "injected" not in reply.text
            else:
                assert reply.json()["choices"][0]["text"] == "abc" * 20
        stats = engine.stats()
        assert stats.restarts == 1 and stats.active_blocks == 0 and engine.health().ok
        assert stats.requests_started == sum(stats.requests_finished.values()) == 12
        engine.check_integrity()


# Too much


@pytest.mark.timeout(60)
def test_overflow_of_the_queue(serve):
    """Ten times what fits: each request is answered or refused, none hangs, and what was accepted is answered right."""
    crowd = 40
    # Beyond the connections it keeps (20 unless told), httpx's pool closes one that it has just lent to another thread.
    limits = httpx.Limits(max_keepalive_connections=crowd)
    with serve("--max-slots", "4", "--max-queue", "8", "--echo-delay", "0.001") as server:
        with httpx.Client(base_url=server.url, timeout=30, limits=limits) as client:

            def one(number: int) -> int:
                prompt = f"{number:04}"
                body = {"model": "echo", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
                reply = client.post("/v1/completions", json=body)
                if reply.status_code == 200:
                    assert reply.json()["choices"][0]["text"] == prompt * 4
                else:
                    assert reply.json()["error"]["code"] == "queue_full" and int(reply.headers["retry-after"]) >= 1
                return reply.status_code

            with ThreadPoolExecutor(crowd) as pool:
                counts = Counter(pool.map(one, range(500)))
        assert set(counts) == {200, 503} and counts.total() == 500, counts
        after = server.at_rest()
        assert after["requests_started_total"] == after["requests_finished_total:length"] == counts[200]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_a_gigabyte(server, declared):
    process = server.tree[0]
    server.post(prompt="abc")
    before, size = process.memory_info().rss, 2**30
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {size}\r\n\r\n" if declared else "Transfer-Encoding: chunked\r\n\r\n"
    part = b"x" * MEBIBYTE if declared else b"%x\r\n" % MEBIBYTE + b"x" * MEBIBYTE + b"\r\n"
    sent = 0
    with server.connect() as wire:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.sendall(head.encode())
            while sent < size:
                wire.sendall(part)
                sent += MEBIBYTE
        answer = read_all(wire)
    assert sent < size // 4, "the server took most of it"
    assert answer == b"" or b" 413 " in answer.splitlines()[0]  # the rest of what was sent may have reset it
    assert process.memory_info().rss - before < 32 * MEBIBYTE
    assert server.post(prompt="abc").status_code == 200


@pytest.mark.timeout(90)
def test_thousands_of_idle_connections(serve):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLE + 1000), hard))
    with serve("--header-timeout", "8") as server, contextlib.ExitStack() as stack:
        process = server.tree[0]
        server.post(prompt="abc")
        base, rss = fds(process), process.memory_info().rss
        wires = [stack.enter_context(server.connect()) for _ in range(IDLE)]
        for wire in wires[::8]:
            wire.sendall(b"POST /v1/comp")  # and some that have begun and do not go on
        assert fds(process) > base + IDLE // 2  # of the first ones time may be up by now
        began = time.monotonic()
        assert server.post(prompt="abc").json()["choices"][0]["text"] == "abc"
        assert time.monotonic() - began < 1
        assert process.memory_info().rss - rss < 200 * MEBIBYTE
        until(lambda: fds(process) <= base)  # none is kept beyond its time
        assert all(b" 408 " in read_all(wire).splitlines()[0] for wire in wires[::40])
        assert server.post(prompt="abc").status_code == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# The world around it


@pytest.mark.timeout(60)
async def test_sigterm_under_load(serve):
    with serve("--max-slots", "8", "--max-queue", "100", "--echo-delay", "0.002") as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

            async def one(number: int) -> str:
                body = {"model": "echo", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
                body["stream"] = bool(number % 2)
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    text = (await reply.aread()).decode()
                    if not number % 2:
                        return json.loads(text)["choices"][0]["text"]
                    assert text.endswith("data: [DONE]\n\n")
                    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                    return "".join(chunk["choices"][0]["text"] for chunk in chunks)

            tasks = [asyncio.ensure_future(one(number)) for number in range(24)]
            while (now := server.metrics())["num_requests_running"] + now["num_requests_waiting"] < 24:
                await asyncio.sleep(0)
            server.process.send_signal(signal.SIGTERM)
            while True:  # what comes later is refused
                try:
                    server.connect().close()
                except (ConnectionRefusedError, ConnectionResetError):
                    break
            assert await asyncio.gather(*tasks) == ["abc" * 20] * 24
        assert server.process.wait(timeout=30) == 0
        socket.create_server(("127.0.0.1", server.port)).close()


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_the_wall_clock_jumps(monkeypatch, stack, jump):
    """Durations, deadlines and time limits go by a clock that nobody sets."""
    now, shift = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: now() + shift)
    body = {"model": "echo", "prompt": "abc", "max_tokens": 90, "ignore_eos": True, "stream": True}
    engine = await stack.enter_async_context(slotline.Engine.open("echo", backend="echo", echo_delay=0.002))
    port = await stack.enter_async_context(running(engine, request_timeout=20.0, write_timeout=1.0))
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
    async with client, client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        shift = jump
        events = [line async for line in lines if line.startswith("data: ")]
    stats = engine.stats()
    assert events[-1] == "data: [DONE]" and len(events) > 60
    assert stats.requests_finished["length"] == 1
    for name in ("time_to_first_token", "request_latency", "queue_time", "inter_token", "step_time"):
        seen = stats.histograms[name]
        assert seen.count and 0 <= seen.total < 20, name
    assert 0 < stats.uptime < 60


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_log_is_full(workers):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", str(port)]
    command += ["--access-log", "--log-format", "json", "--api-workers", workers]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full, env=os.environ)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            def ready() -> bool:
                with contextlib.suppress(httpx.ConnectError):
                    return client.get("/health").status_code == 200
                return False

            until(ready)
            for _ in range(50):
                reply = client.post("/v1/completions", json={"model": "echo", "prompt": "abc", "max_tokens": 3})
                assert reply.json()["choices"][0]["text"] == "abc"
            assert client.post("/v1/completions", json={"model": "x", "prompt": "abc"}).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
