"""The page at /docs in a browser: Chromium, driven over its debugging pipe."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SERVE = [sys.executable, "-P", "-m", "slotline", "serve", "echo", "--backend", "echo", "--port", "0"]
# Chromium takes commands from descriptor 3 and answers on 4.
ONTO_3_AND_4 = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
APPEARS = """new Promise((done, fail) => {
  const look = () => { if (%s) { watch.disconnect(); done(true); } };
  const watch = new MutationObserver(look);
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  setTimeout(() => { watch.disconnect(); fail(document.body.innerText.slice(0, 2000)); }, 60000);
  look();
})"""
CHAT = '.opblock:has([data-path="/v1/chat/completions"])'

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]


class Page:
    """One page of a headless browser, and all that it did."""

    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # to the browser, from the browser
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0], theirs[1])]  # out of the way of 3 and 4
        command = [sys.executable, "-c", ONTO_3_AND_4, *map(str, given), str(CHROMIUM)]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            [*command, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (ours[0], theirs[1], *given):
            os.close(fd)
        self._to, self._from = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self.events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        self._asked = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser is gone"
            data += byte
        message: dict[str, Any] = json.loads(data)
        if "method" in message:
            self.events.append(message)
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser for something and return its answer."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._asked:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        while not self.params("Page.loadEventFired"):
            self._read()

    def run(self, script: str) -> Any:
        """Evaluate a script in the page; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until something holds of the document."""
        assert self.run(APPEARS % condition)

    def params(self, method: str) -> list[dict[str, Any]]:
        """Return what the events of one kind said."""
        return [event["params"] for event in self.events if event["method"] == method]

    @property
    def complaints(self) -> list[Any]:
        """Return the errors of the console, the page's own and the browser's."""
        said = [p for p in self.params("Runtime.consoleAPICalled") if p["type"] in ("error", "assert")]
        logged = [p["entry"] for p in self.params("Log.entryAdded") if p["entry"]["level"] == "error"]
        return [*self.params("Runtime.exceptionThrown"), *said, *logged]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._from.close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """Start a browser for one test."""
    page = Page(tmp_path / "profile")
    yield page
    page.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start servers and return their addresses."""
    processes = []

    def start(*options: str) -> str:
        process = subprocess.Popen([*SERVE, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        processes.append(process)
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None, "the server did not start"
        return found[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def asked(page: Page) -> set[str]:
    """Return the paths that the page asked this server for; what is in the page itself is no request."""
    urls = [urlsplit(p["request"]["url"]) for p in page.params("Network.requestWillBeSent")]
    assert {url.hostname for url in urls if url.scheme != "data"} == {"127.0.0.1"}
    return {url.path for url in urls if url.scheme != "data"}


def click(page: Page, selector: str) -> None:
    """Press something as soon as it is there."""
    page.wait(f"document.querySelector({json.dumps(selector)})")
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def text_of(page: Page, selector: str) -> str:
    """Return the text of something as soon as it is there."""
    page.wait(f"document.querySelector({json.dumps(selector)})")
    return str(page.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_the_page_shows_every_operation_and_asks_nobody_else(page: Page, serve: Callable[..., str]) -> None:
    page.open(f"{serve()}/docs")
    page.wait("document.querySelector('.opblock')")
    document = page.run("fetch('openapi.json').then(reply => reply.json())")
    shown = page.run("[...document.querySelectorAll('.opblock [data-path]')].map(each => each.dataset.path)")
    assert sorted(shown) == sorted(document["paths"])
    click(page, f"{CHAT} .opblock-summary-control")
    assert '"messages"' in text_of(page, f"{CHAT} .opblock-section-request-body pre")
    assert "Answer a conversation" in text_of(page, CHAT)
    assert {"/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/openapi.json"} <= asked(page)
    assert page.complaints == []


def test_the_page_sends_a_request_as_it_stands(page: Page, serve: Callable[..., str]) -> None:
    """Who presses "Try it out" and "Execute" gets an answer."""
    page.open(f"{serve()}/docs")
    click(page, f"{CHAT} .opblock-summary-control")
    click(page, f"{CHAT} .try-out button")
    click(page, f"{CHAT} button.execute")
    shown = text_of(page, f"{CHAT} .live-responses-table")
    assert "200" in shown and '"content": "Name three river"' in shown
    assert "/v1/chat/completions" in asked(page) and page.complaints == []
