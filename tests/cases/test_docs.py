"""What the documentation shows: its Python runs, its curl runs, and both print what the page says."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slotline.apis.native.abort import AbortBody
from slotline.apis.native.bodies import InteractiveBody
from slotline.apis.native.tokens import DetokenizeBody, TokenizeBody
from slotline.apis.openai.embeddings import EmbeddingBody
from slotline.apis.openai.models import IRRELEVANT, UNSUPPORTED, ChatBody, CompletionBody

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN_URL = "http://127.0.0.1:8000"


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page: kind and content."""
    return FENCE.findall((DOCS / page).read_text(encoding="utf-8"))


def run_python(page: str, url: str = SHOWN_URL, having: str = "") -> list[tuple[str, str]]:
    """Run the Python blocks that have a text in them, in one namespace; return what was shown and what was printed."""
    names: dict[str, Any] = {"__name__": page}
    found = [*blocks(page), ("", "")]
    results = []
    for (kind, code), (kind_after, shown) in pairwise(found):
        if kind != "python" or having not in code:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed), warnings.catch_warnings(record=True):
            warnings.simplefilter("default")  # a page may show what warns
            exec(compile(code.replace(SHOWN_URL, url), page, "exec"), names)
        results.append((shown if kind_after == "text" else "", printed.getvalue()))
    return results


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: the pages open engines that leave the number as it is."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_pipeline_page_prints_what_it_shows():
    results = run_python("pipeline.md")
    assert len(results) > 10
    for shown, printed in results:
        assert printed == shown


@pytest.mark.usefixtures("one_thread")
def test_the_embedding_page_runs_and_prints_what_it_shows():
    results = run_python("embedding.md")
    assert len(results) == 5
    assert all(printed == shown for shown, printed in results)
    assert results[-1][1]


def test_the_clients_of_the_server_page_print_what_it_shows(server):
    results = run_python("api_server.md", server.url, having="openai")
    assert len(results) >= 2
    for shown, printed in results:
        assert printed == shown


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_commands_of_the_server_page_work(server):
    commands = [code for kind, code in blocks("api_server.md") if kind == "sh" and "curl" in code]
    assert len(commands) >= 3
    for command in commands:
        done = subprocess.run(
            ["bash", "-ec", command.replace(SHOWN_URL, server.url)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        for body in re.findall(r"^(?:data: )?(\{.*\})$", done.stdout, re.MULTILINE):
            assert "error" not in json.loads(body), body
        assert '"logprobs"' in done.stdout


def test_the_page_names_every_field():
    page = (DOCS / "api_server.md").read_text(encoding="utf-8")
    fields = page.partition("### Fields")[2].partition("### Answers")[0]
    bodies = (ChatBody, CompletionBody, EmbeddingBody, InteractiveBody, TokenizeBody, DetokenizeBody, AbortBody)
    names = set().union(IRRELEVANT, UNSUPPORTED, *(body.model_fields for body in bodies))
    assert not [name for name in sorted(names) if f"`{name}`" not in fields]
    named = set(re.findall(r"^\| (?:`(\w+)`(?:, )?)+", fields, re.MULTILINE))
    assert named <= names, "the page names a field that is not there"
