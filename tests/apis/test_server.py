"""``slotline serve`` as a process of its own, and OpenAI's client talking to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

COMMAND = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0"]


class Process:
    """A running server."""

    def __init__(self, *options):
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        self.ready = self.process.stdout.readline()
        self.url = re.search(r"http://\S+", self.ready)[0]

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server():
    with Process("--served-model-name", "m", "--served-model-name", "other") as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_ready_line(server):
    assert re.search(r"serving m, other at http://127\.0\.0\.1:\d+ \(context \d+, KV cache \d+ tokens\)", server.ready)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m", "other"]
    assert client.models.retrieve("other").id == "other"


def test_completions(client):
    done = client.completions.create(model="m", prompt="Hello", max_tokens=5)
    assert done.choices[0].text == "Hello" and done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 5)
    done = client.completions.create(model="m", prompt=["ab", "cd"], max_tokens=2, n=2)
    assert [(c.index, c.text) for c in done.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]


def test_completions_streamed(client):
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(model="m", prompt="HiHiHi", max_tokens=6, n=2, stream=True, stream_options=options)
    )
    texts, ends = {0: "", 1: ""}, []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] * (choice.finish_reason is not None)
    assert texts == {0: "HiHiHi", 1: "HiHiHi"} and sorted(ends) == [0, 1]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12


def test_chat(client):
    messages = [{"role": "user", "content": "Hello"}]
    done = client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    assert done.choices[0].message.role == "assistant" and done.choices[0].message.content == "Hell"
    with client.chat.completions.create(model="m", messages=messages, max_tokens=4, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hell"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"


def test_error_classes(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.completions.create(model="nope", prompt="x")
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="m", prompt="x", temperature=5)
    assert found.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="m", prompt="x" * 40_000, stream=True)
    assert found.value.code == "context_length_exceeded"


def test_warnings_reach_the_client(client):
    done = client.completions.create(model="m", prompt="x", max_tokens=1, logprobs=2)
    assert done.choices[0].logprobs is None
    assert [warning["param"] for warning in done.warnings] == ["logprobs"]


def test_streams_do_not_mix(server):
    def one(number):
        body = {"model": "m", "messages": f"stream {number:02}", "max_tokens": 36, "ignore_eos": True, "stream": True}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        *events, last = reply.text.removesuffix("\n\n").split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert last == "data: [DONE]"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        return number, text, {chunk["id"] for chunk in chunks}

    with ThreadPoolExecutor(16) as pool:
        done = list(pool.map(one, range(16)))
    assert all(text == f"stream {number:02}" * 4 for number, text, _ in done)
    assert len(set.union(*(ids for _, _, ids in done))) == 16


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::1"])
def test_a_loopback_server_refuses_foreign_host_names(server, host):
    reply = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert reply.status_code == 421 and reply.json()["error"]["code"] == "wrong_host"
    port = server.url.rsplit(":", 1)[1]
    for own in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "app.localhost"):
        assert httpx.get(f"{server.url}/v1/models", headers={"host": own}).status_code == 200


def test_a_web_page_of_another_origin_gets_no_leave(server):
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    reply = httpx.options(f"{server.url}/v1/chat/completions", headers=headers)
    assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers


def test_metrics_are_valid_and_the_series_are_few(server):
    from prometheus_client.parser import text_string_to_metric_families

    def series():
        families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
        assert len({family.name for family in families}) == len(families)
        return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}

    before = series()
    assert ("slotline:num_requests_running", (("model_name", "m"),)) in before
    for number in range(20):
        httpx.post(f"{server.url}/v1/completions", json={"model": f"junk-{number}", "prompt": "x", "user": str(number)})
        httpx.request(f"X{number}", f"{server.url}/v1/junk-{number}")
    assert series() == before


def gauges(url):
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {
        line.split("{")[0].removeprefix("slotline:"): float(line.split()[-1]) for line in lines if "_bucket" not in line
    }


def wait_until_idle(url):
    """Scrape until nothing runs; a test's own time limit ends it otherwise."""
    while True:
        now = gauges(url)
        if now["num_requests_running"] == now["num_requests_waiting"] == now["kv_blocks_active"] == 0:
            return now


@pytest.mark.timeout(20)
@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_slot(stream):
    with Process("--max-slots", "1", "--echo-delay", "0.01") as server:
        body = {"model": "echo", "prompt": "abc", "max_tokens": 20_000, "ignore_eos": True, "stream": stream}
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        head += f"\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as wire:
            wire.sendall(head.encode() + raw)
            if stream:
                wire.recv(1000)
            else:
                while gauges(server.url)["num_requests_running"] == 0:
                    pass
        wait_until_idle(server.url)
        reply = httpx.post(f"{server.url}/v1/completions", json={"model": "echo", "prompt": "abc", "max_tokens": 3})
        assert reply.json()["choices"][0]["text"] == "abc"
        assert server.stop()[0] == 0


@pytest.mark.timeout(30)
def test_sigterm_lets_a_stream_end():
    with Process("--echo-delay", "0.02") as server:
        body = {"model": "echo", "prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and len(events) > 50
        assert server.stop()[0] == 0


@pytest.mark.timeout(30)
def test_a_second_signal_ends_at_once():
    with Process("--echo-delay", "0.02") as server:
        body = {"model": "echo", "prompt": "abc", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            timer = threading.Timer(0.5, server.process.send_signal, [signal.SIGTERM])
            timer.start()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        timer.join()
        server.process.communicate(timeout=10)


def test_a_model_that_cannot_be_opened_ends_the_server():
    command = [*COMMAND[:5], "/no/such/model", "--backend", "torch", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "/no/such/model" in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_one_line(server):
    command = [*COMMAND[:-1], server.url.rsplit(":", 1)[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "cannot listen on 127.0.0.1" in done.stderr and "Traceback" not in done.stderr
