"""Several API processes and one for the engine: they answer as one does, and any of them may die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

STREAMS = 16


@pytest.fixture(scope="module")
def many(serve):
    with serve("--api-workers", "2", "--echo-delay", "0.005", "--max-slots", "32") as server:
        yield server


def children(server) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the engine's process and those that speak HTTP, once all are there."""
    while True:
        by_role: dict[str, list[psutil.Process]] = {"engine": [], "api": []}
        for process in server.tree[1:]:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError, IndexError):  # one that ends, or has not begun
                by_role[process.cmdline()[-1]].append(process)
        if len(by_role["engine"]) == 1 and by_role["api"]:
            return by_role["engine"][0], by_role["api"]


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int, started: asyncio.Event | None = None):
    """Return the text of a stream and the error it ended with, if any; None where the connection broke."""
    body = {"model": "echo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    text, error = "", None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                return text, json.loads(await reply.aread())["error"]
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    error = chunk.get("error")
                    text += chunk["choices"][0]["text"] if error is None else ""
                    if started is not None:
                        started.set()
    except httpx.RemoteProtocolError:
        return text, None
    return text, error or "done"


def client_of(server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits)


async def begin(client: httpx.AsyncClient, tokens: int) -> list[asyncio.Task]:
    """Start streams; return them when each has its first token."""
    started = [asyncio.Event() for _ in range(STREAMS)]
    tasks = [asyncio.ensure_future(stream(client, f"stream {i:02} ", tokens, started[i])) for i in range(STREAMS)]
    for event in started:
        await event.wait()
    return tasks


async def test_answers_and_counts_are_as_of_one_process(many):
    before = many.metrics()
    async with client_of(many) as client:
        done = await asyncio.gather(*(stream(client, f"stream {i:02} ", 40) for i in range(STREAMS)))
        assert done == [(f"stream {i:02} " * 4, "done") for i in range(STREAMS)]
        for _ in range(8):  # whichever process is asked
            now = many.metrics()
            assert now["requests_started_total"] - before["requests_started_total"] == STREAMS
            assert now["requests_finished_total:length"] - before["requests_finished_total:length"] == STREAMS
            assert now["time_to_first_token_seconds_count"] == now["requests_started_total"]


async def test_a_killed_worker_takes_its_own_streams_with_it_and_no_others(many):
    async with client_of(many) as client:
        tasks = await begin(client, 200)
        victim = children(many)[1][0]
        victim.kill()
        done = await asyncio.gather(*tasks)
        whole = [text for text, end in done if end == "done"]
        assert all(text == (f"stream {i:02} " * 20)[:200] for i, (text, end) in enumerate(done) if end == "done")
        assert all(f"stream {i:02} ".startswith(text[:10]) for i, (text, end) in enumerate(done))
        assert 0 < len(whole) < STREAMS, "the system spread all streams on one process"
        assert many.at_rest()["kv_blocks_active"] == 0
        again = await asyncio.gather(*(stream(client, "abc", 30) for _ in range(STREAMS)))
        assert again == [("abc" * 10, "done")] * STREAMS  # those of its socket wait for the next process
    assert "API" in many.log and "SIGKILL" in many.log
    assert len(children(many)[1]) == 2


async def test_a_killed_engine_fails_its_requests_and_is_started_again(many):
    async with client_of(many) as client:
        tasks = await begin(client, 10_000)
        body = {"model": "echo", "prompt": "abc", "max_tokens": 10_000, "ignore_eos": True}
        whole = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        while many.metrics()["num_requests_running"] < STREAMS + 4:
            await asyncio.sleep(0)
        children(many)[0].kill()
        for text, error in await asyncio.gather(*tasks):
            assert text and error["code"] == "engine_lost" and error["type"] == "unavailable_error"
        for reply in await asyncio.gather(*whole):
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_lost"
            assert int(reply.headers["retry-after"]) >= 1
        while True:  # refused for as long as there is no engine, then answered
            reply = await client.post("/v1/completions", json={"model": "echo", "prompt": "abc", "max_tokens": 3})
            if reply.status_code == 200:
                break
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_lost"
        assert reply.json()["choices"][0]["text"] == "abc"
        assert (await client.get("/health/live")).status_code == 200
    assert many.at_rest()["kv_blocks_active"] == 0


async def test_readiness_follows_the_engine(many):
    engine, _ = children(many)
    async with client_of(many) as client:
        assert (await client.get("/health/ready")).status_code == 200
        engine.kill()
        while (reply := await client.get("/health/ready")).status_code == 200:
            await asyncio.sleep(0)
        assert reply.json()["status"] == "loading"
        assert (await client.get("/health/live")).status_code == 200
        while (await client.get("/health/ready")).status_code != 200:
            await asyncio.sleep(0)


async def test_sigterm_drains_all_processes(many):
    """The last of the module: it ends the server."""
    processes = many.tree
    async with client_of(many) as client:
        tasks = await begin(client, 200)
        many.process.send_signal(signal.SIGTERM)
        done = await asyncio.gather(*tasks)
    assert done == [((f"stream {i:02} " * 20)[:200], "done") for i in range(STREAMS)]
    assert many.process.wait(timeout=30) == 0
    assert not any(process.is_running() for process in processes[1:])


@pytest.mark.timeout(60)
def test_an_engine_that_is_stuck_is_replaced(serve):
    with serve("--api-workers", "1", "--stall-timeout", "0.3", "--echo-delay", "50") as server:
        engine, _ = children(server)
        reply = server.post(prompt="abc")  # the step takes longer than the engine may
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_lost"
        psutil.wait_procs([engine], timeout=20)
        assert not engine.is_running()
        while "the engine process ended (exit code 70); starting another" not in server.log:
            pass  # a thread writes it


@pytest.mark.timeout(60)
async def test_an_engine_process_that_hangs_is_replaced(serve):
    """A stopped process ends nothing, and closes nothing: only its silence tells."""
    with serve("--api-workers", "1", "--stall-timeout", "3", "--echo-delay", "0.01") as server:
        engine, _ = children(server)
        async with client_of(server) as client:
            started = asyncio.Event()
            task = asyncio.ensure_future(stream(client, "abc", 10_000, started))
            await started.wait()
            engine.suspend()
            text, error = await task
            assert text and error["code"] == "engine_lost"
            while (await client.get("/health/ready")).status_code != 200:
                await asyncio.sleep(0)
        assert server.post(prompt="abc").json()["choices"][0]["text"] == "abc"
        assert not engine.is_running() and children(server)[0].pid != engine.pid
        assert server.stop() == 0


@pytest.mark.timeout(60)
def test_no_process_outlives_the_parent(serve):
    with serve("--api-workers", "2") as server:
        orphans = server.tree[1:]
        server.process.kill()
        gone, alive = psutil.wait_procs(orphans, timeout=30)
        assert not alive and len(gone) == 3


def test_a_model_that_cannot_be_opened_ends_all():
    command = [sys.executable, "-P", "-m", "slotline", "serve", "/no/such/model", "--backend", "torch", "--port", "0"]
    done = subprocess.run(
        [*command, "--api-workers", "1"], capture_output=True, text=True, check=False, timeout=60, env=os.environ
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "/no/such/model" in done.stderr and "the engine process could not start" in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_not_shared(serve):
    with serve("--api-workers", "1") as server:
        command = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo"]
        command += ["--port", str(server.port), "--api-workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1 and "cannot listen on" in done.stderr and "Traceback" not in done.stderr
