"""What a server refuses before it reads it, and how long it waits for the rest."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl

import httpx
import pytest
import trustme

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def read_all(wire: socket.socket) -> bytes:
    """Read until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := wire.recv(65536):
            data += part
    return data


def send(wire: socket.socket, data: bytes) -> None:
    """Send; a server that has refused already may not take it all."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        wire.sendall(data)


def error_of(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("extra", [b"X: " + b"a" * 2**20, b"".join(b"X-%d: a\r\n" % i for i in range(5000))])
def test_a_head_that_is_too_long(server, extra):
    before = server.tree[0].memory_info().rss
    with server.connect() as wire:
        send(wire, HEAD + extra + b"\r\n\r\n")
        answer = read_all(wire)
    if answer:  # the rest of what was sent may have reset the connection first
        status, error = error_of(answer)
        assert status == 431 and error["code"] == "head_too_large"
    assert server.tree[0].memory_info().rss - before < 20 * 2**20
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_long_head_is_told_so(server):
    with server.connect() as wire:
        send(wire, HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(250)) + b"\r\n")
        assert error_of(read_all(wire))[0] == 431
    with server.connect() as wire:
        send(wire, HEAD + b"X: " + b"a" * 70_000 + b"\r\n\r\n")
        assert error_of(read_all(wire))[0] == 431


def test_a_hundred_headers_pass(server):
    headers = {f"x-{i}": "a" * 100 for i in range(100)}
    for _ in range(3):  # each request of a connection is counted anew
        assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200


def test_what_is_no_http_gets_the_envelope(server):
    with server.connect() as wire:
        send(wire, b"\x16\x03\x01 what\r\n\r\n")
        status, error = error_of(read_all(wire))
    assert status == 400 and error["code"] == "bad_http"


def test_trailers_count_too(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as wire:
        send(wire, head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ")
        send(wire, b"a" * 2**20)
        read_all(wire)  # ends, since the server closes
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.timeout(30)
@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp"])
def test_a_head_that_does_not_come_is_not_waited_for(server, begun):
    with server.connect() as wire:
        send(wire, begun)
        status, error = error_of(read_all(wire))
    assert status == 408 and error["code"] == "head_timeout"


def test_a_stream_may_take_longer_than_a_head(serve):
    with serve("--header-timeout", "0.2", "--keep-alive", "1", "--echo-delay", "0.05") as server:
        reply = server.post(prompt="abc", max_tokens=40, ignore_eos=True, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")


def test_a_body_that_says_it_is_too_long_is_not_read(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as wire:
        send(wire, head + b"Content-Length: 1000001\r\n\r\n")
        status, error = error_of(read_all(wire))
    assert status == 413 and error["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nope"])
def test_no_route_reads_a_body_that_is_too_long(server, path):
    with server.connect() as wire:
        send(wire, b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n" % path.encode())
        assert error_of(read_all(wire))[0] == 413


def test_tls(serve, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with serve("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")) as server:
        assert server.url.startswith("https://")
        body = {"model": "echo", "prompt": "abc", "max_tokens": 3, "stream": True}
        with httpx.Client(verify=context, base_url=server.url) as client:
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
        with httpx.Client() as stranger, pytest.raises(httpx.ConnectError):
            stranger.get(server.url)
        with server.connect() as wire:
            send(wire, HEAD + b"\r\n")
            assert b"HTTP/1.1 200" not in read_all(wire)
        assert server.stop() == 0


@pytest.mark.parametrize("options", [["--tls-cert"], ["--tls-cert", "--tls-key"], ["--api-key-file"]])
def test_files_that_cannot_be_used_end_the_command(tmp_path, options):
    import subprocess
    import sys

    (tmp_path / "empty").write_text("")
    given = [word for option in options for word in (option, str(tmp_path / "empty"))]
    command = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_origins_are_allowed_by_name_only(serve, server):
    ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with serve("--allowed-origin", "https://app.example") as open_server:
        url = f"{open_server.url}/v1/chat/completions"
        reply = httpx.options(url, headers=ask)
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-credentials" not in reply.headers
        evil = httpx.options(url, headers={**ask, "origin": "https://evil.example"})
        assert evil.status_code == 400 and "access-control-allow-origin" not in evil.headers
        body = {"model": "echo", "messages": "abc", "max_tokens": 3}
        reply = httpx.post(url, json=body, headers={"origin": "https://app.example"})
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
    reply = httpx.options(f"{server.url}/v1/chat/completions", headers=ask)
    assert "access-control-allow-origin" not in reply.headers
