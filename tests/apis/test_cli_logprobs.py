"""``slotline score`` and ``slotline generate --logprobs``, and how the command line warns."""

import json
import math
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner

import slotline
from slotline.apis.cli.commandline import cli
from slotline.testing.tiny import write_tiny_llama

TEXT = "the quick brown dog"


def run(*arguments, **options):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def options(model):
    return ["--backend", "torch", "--device", "cpu", "--kv-cache-tokens", "1024", "--max-slots", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def expected(model):
    """Return what the Python API says of two texts."""
    with slotline.pipeline(model, backend="torch", device="cpu", kv_cache_tokens=1024) as pipe:
        return pipe.score([TEXT, "fox"])


def scored(done):
    assert done.exit_code == 0, done.stderr
    return [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]


def test_score_prints_sum_mean_and_perplexity(model, options, expected):
    done = run("score", "--model", model, *options, TEXT, "fox")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, score in zip(lines, expected, strict=True):
        count = len(score.token_ids)
        mean = score.total / (count - 1)
        assert line == f"{count} tokens: sum {score.total:.4f}, mean {mean:.4f}, perplexity {score.perplexity:.4f}"


def test_score_lists_tokens(model, options, expected):
    *lines, total = run("score", "--model", model, *options, "--tokens", TEXT).stdout.splitlines()
    assert total.startswith(f"{len(lines)} tokens: sum ")
    values, tokens = zip(*(line.split(maxsplit=1) for line in lines), strict=True)
    assert values == ("-", *(f"{value:.4f}" for value in expected[0].logprobs[1:]))
    assert "".join(json.loads(token) for token in tokens) == TEXT


def test_score_as_json_has_everything(model, options, expected):
    first, second = scored(run("score", "--model", model, *options, "--json", TEXT, "fox"))
    assert list(first) == ["text", "token_ids", "tokens", "logprobs", "sum", "mean", "perplexity", "scored_tokens"]
    assert first["text"] == TEXT == "".join(first["tokens"]) and second["text"] == "fox"
    assert first["token_ids"] == expected[0].token_ids and first["logprobs"][0] is None
    assert first["logprobs"][1:] == pytest.approx(expected[0].logprobs[1:], abs=1e-5)
    assert first["sum"] == pytest.approx(expected[0].total, abs=1e-4)
    assert first["perplexity"] == pytest.approx(math.exp(-first["mean"]), rel=1e-6)


def test_score_reads_files_and_stdin(model, options, tmp_path):
    file = tmp_path / "text"
    file.write_text("the dog\n\nthe fox é\n", encoding="utf-8")
    asked = ["score", "--model", model, *options, "--json"]
    assert [s["text"] for s in scored(run(*asked, "--file", file))] == ["the dog\n\nthe fox é"]
    assert [s["text"] for s in scored(run(*asked, "--file", file, "--lines"))] == ["the dog", "the fox é"]
    assert [s["text"] for s in scored(run(*asked, TEXT, "--file", file))] == [TEXT, "the dog\n\nthe fox é"]
    assert [s["text"] for s in scored(run(*asked, input="the dog\n"))] == ["the dog"]
    many = "".join(f"line {number}\n" for number in range(7))  # more than there are slots
    assert [s["text"] for s in scored(run(*asked, "--lines", input=many))] == many.splitlines()


def test_one_token_has_no_score(model, options):
    (report,) = scored(run("score", "--model", model, *options, "--json", "a"))
    assert report["logprobs"] == [None] and report["sum"] == 0 and report["scored_tokens"] == 0
    assert report["mean"] is None and report["perplexity"] is None
    assert run("score", "--model", model, *options, "a").stdout.startswith("1 token: no token")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--backend", "echo", "--model", "echo", "abc"], 1, "cannot score"),
        (["--lines"], 2, "no text to score"),
        (["--file", "/no/such/file"], 2, "/no/such/file"),
    ],
)
def test_score_fails_in_one_line(arguments, code, said):
    done = run("score", *arguments, input="\n")
    assert done.exit_code == code and said in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe")
    done = run("score", "--file", file)
    assert done.exit_code == 2 and "not UTF-8" in done.stderr


def test_generate_prints_a_line_a_token(model, options):
    asked = ["generate", model, *options, "--prompt", "the", "--max-tokens", 6, "--temperature", 0, "--ignore-eos"]
    text = run(*asked).stdout
    lines = run(*asked, "--logprobs", 2).stdout.splitlines()
    assert len(lines) == 6
    rows = [line.split() for line in lines]
    assert all(len(row) == 6 and row[:2] == row[2:4] for row in rows)  # greedy: the token is the likeliest
    assert all(float(row[2]) >= float(row[4]) for row in rows)
    if all("bytes:" not in line for line in lines):
        assert "".join(json.loads(row[1]) for row in rows) == text.removesuffix("\n")
    assert [line.split() for line in run(*asked, "--logprobs", 0).stdout.splitlines()] == [row[:2] for row in rows]


def test_generate_shows_the_processed_ones(model, options):
    asked = ["generate", model, *options, "--prompt", "the", "--max-tokens", 3, "--top-k", 1, "--ignore-eos"]
    lines = run(*asked, "--logprobs", 3, "--logprobs-mode", "processed").stdout.splitlines()
    assert [[float(value) for value in line.split()[::2]] for line in lines] == [[0.0, 0.0]] * 3


def test_generate_refuses_too_many(model, options):
    done = run("generate", model, *options, "--prompt", "the", "--logprobs", 21)
    assert done.exit_code == 1 and "logprobs is 21; allowed: 0 to 20" in done.stderr


def test_generate_without_logprobs_in_the_backend_warns_and_answers():
    done = run("generate", "echo", "--backend", "echo", "--prompt", "abc", "--max-tokens", 3, "--logprobs", 2)
    assert (done.exit_code, done.stdout) == (0, "abc\n")
    assert done.stderr == "warning: this backend has no logprobs; the answer has none\n"


def test_warnings_are_yellow_in_a_terminal():
    side, other = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-P", "-m", "slotline", "generate", "echo", "--backend", "echo", "--prompt", "abc"]
    done = subprocess.run(
        [*command, "--max-tokens", "3", "--logprobs", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=other,
        env=environ,
        check=True,
        timeout=60,
    )
    os.close(other)
    shown = b""
    try:
        while part := os.read(side, 1000):
            shown += part
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(side)
    assert done.stdout == b"abc\n"
    assert b"\x1b[33mwarning: this backend has no logprobs" in shown
