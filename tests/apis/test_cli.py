"""The command line, in this process where that is enough, else as a process of its own."""

import os
import pty
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import slotline
from slotline.apis.cli import group
from slotline.apis.cli.chat import Conversation, _talk
from slotline.apis.cli.commandline import cli
from slotline.apis.cli.session import open_session
from slotline.errors import PluginError
from slotline.hookspecs import hookimpl

ECHO = ["echo", "--backend", "echo"]


def run(*arguments, **options):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], **options)


def start(*arguments, **options):
    return subprocess.Popen([sys.executable, "-P", "-m", "slotline", *arguments], **options)


def test_version():
    assert run("--version").output == f"slotline {slotline.__version__}\n"


@pytest.mark.parametrize("command", ["chat", "generate", "score", "serve"])
def test_every_engine_option_is_there(command):
    shown = run(command, "--help").output
    for field in slotline.EngineConfig.__dataclass_fields__:
        assert field == "model" or f"--{field.replace('_', '-')}" in shown


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from slotline.apis.cli.commandline import cli;"
        "CliRunner().invoke(cli, ['serve', '--help']);"
        "print([m for m in ('torch', 'starlette', 'uvicorn', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_piped_chat_answers_each_line_on_stdout_alone():
    with start(
        "chat", *ECHO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate("Hello\n\nWorld é\n", timeout=60)
    assert process.returncode == 0 and out == "Hello\nWorld é\n" and "\x1b" not in out + err


def test_piped_chat_survives_a_closed_pipe():
    with start("chat", *ECHO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b"Hello\n" * 20)
        process.stdin.close()
        assert b"Traceback" not in process.stderr.read()


def test_generate_continues_the_prompt():
    assert run("generate", *ECHO, "--prompt", "abc", "--max-tokens", 5, "--ignore-eos").stdout == "abcab\n"
    assert run("generate", *ECHO, "--max-tokens", 3, input="xyz\n").stdout == "xyz\n"


def test_warnings_go_to_stderr():
    done = run("generate", *ECHO, "--prompt", "abc", "--max-tokens", 1, "--seed", 5)
    assert done.stdout == "a\n" and "seed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["chat", "--max-slotz", "3"], 2, "--max-slots"),
        (["chat", *ECHO, "--max-slots", "0"], 2, "max_slots is 0"),
        (["chat", *ECHO, "--temperature", "9"], 1, "temperature is 9"),
        (["chat", *ECHO, "--backend", "ecko"], 2, "did you mean 'echo'"),
        (["chat", "/no/such/model", "--backend", "torch"], 1, "/no/such/model"),
        (["generate", *ECHO, "--prompt", ""], 1, "0 tokens"),
        (["nope"], 2, "No such command"),
        (["models", "remove", "nope"], 1, "nope"),
    ],
)
def test_errors_are_one_line(arguments, code, said):
    done = run(*arguments, input="x\n")
    assert done.exit_code == code and said in done.stderr and "Traceback" not in done.stderr
    assert [line.startswith("Error: ") for line in done.stderr.splitlines()].count(True) == 1


def test_debug_shows_where():
    done = run("--debug", "chat", *ECHO, "--max-slots", "0")
    assert isinstance(done.exception, slotline.SlotlineError)


def test_config_file_environment_and_options(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('[engine]\nmodel = "echo"\nbackend = "nope"\nmax_slots = 0\n')
    done = run("generate", "--config", file, "--backend", "echo", "--prompt", "ab", "--max-tokens", 2)
    assert done.exit_code == 2 and "max_slots" in done.stderr
    environ = {"SLOTLINE_MAX_SLOTS": "2"}
    done = run("generate", "--config", file, "--backend", "echo", "--prompt", "ab", "--max-tokens", 2, env=environ)
    assert done.stdout == "ab\n"


def test_plugins_lists_what_is_loaded():
    shown = run("plugins").output
    assert "slotline.apis.openai  slotline" in shown and "slotline_register_apis" in shown and "echo  " in shown


def test_doctor_ends_with_advice():
    done = run("doctor")
    assert done.exit_code in (0, 1) and f"slotline  {slotline.__version__}" in done.output
    assert done.output.splitlines()[-1].endswith(".")


class FakeSource:
    def __init__(self):
        self.models = ["a/b"]

    def list_cached(self):
        return [slotline_cached(name) for name in self.models]

    def remove(self, name):
        found = name in self.models
        self.models = [other for other in self.models if other != name]
        return found


def slotline_cached(name):
    from types import SimpleNamespace

    return SimpleNamespace(name=name, bytes=1_500_000, format="gguf", path=None)


def test_models_are_listed_and_removed(monkeypatch):
    source = FakeSource()

    class Manager:
        def registry(self, kind):
            return {"fake": source} if kind == "model_sources" else {}

    monkeypatch.setattr("slotline.apis.cli.models.PluginManager", Manager)
    assert run("models", "list").stdout == "a/b  1.5 MB  gguf\n"
    assert run("models", "remove", "a/b").stdout == "removed a/b\n"
    assert run("models", "list").stdout == ""


def test_hook_slotline_register_commands(monkeypatch):
    @click.command()
    def shout():
        click.echo("HELLO")

    class Plugin:
        @hookimpl
        def slotline_register_commands(self, register):
            register(shout)

    def manager():
        made = slotline.manager.PluginManager("")
        made.register(Plugin(), "shouting")
        return made

    monkeypatch.setattr(group, "PluginManager", manager)
    assert run("shout").output == "HELLO\n"
    assert "shout" in run("--help").output and run("--help").output.count("  chat ") == 1


def test_help_works_with_a_broken_plugin(monkeypatch):
    def broken():
        raise PluginError("plugin 'x' cannot be imported")

    monkeypatch.setattr(group, "PluginManager", broken)
    assert run("--help").exit_code == 0
    assert "plugin 'x'" in run("nope").output


# In a terminal


class Terminal:
    """`slotline chat` on a pseudo-terminal."""

    def __init__(self, *arguments):
        self.side, other = pty.openpty()
        environ = {**os.environ, "TERM": "dumb"}
        self.process = start("chat", *arguments, stdin=other, stdout=other, stderr=other, env=environ, close_fds=True)
        os.close(other)
        self.seen = ""
        self.mark = 0

    def read_until(self, text):
        """Read up to and including ``text``, after what was read before."""
        while (found := self.seen.find(text, self.mark)) < 0:
            self.seen += os.read(self.side, 1000).decode(errors="replace")
        self.mark = found + len(text)

    def write(self, text):
        os.write(self.side, text.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.side)


@pytest.mark.timeout(60)
def test_a_conversation_on_a_terminal():
    with Terminal(*ECHO, "--echo-delay", "0.02", "--ignore-eos") as terminal:
        terminal.read_until("> ")
        terminal.write("abcdefgh\n")
        terminal.read_until("abcdefgh\r\nabcdefghab")
        terminal.interrupt()
        terminal.read_until("stopped")
        terminal.read_until("> ")
        terminal.write("/exit\n")
        assert terminal.process.wait(timeout=20) == 0
        assert "Traceback" not in terminal.seen


# A signal that comes between a prompt and the wait for a key is seen with the next key only, so
# what Ctrl-C does at the prompt is tested with an input() that raises.


class Person:
    """Types lines; None is Ctrl-C, and the end Ctrl-D."""

    def __init__(self, *lines):
        self.lines = list(lines)

    def __call__(self, prompt):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        return line


@pytest.fixture
def conversation():
    with open_session(slotline.EngineConfig(model="echo", backend="echo")) as session:
        yield Conversation(session, {"max_tokens": 100}, None)


def talk(monkeypatch, conversation, *lines):
    """Return the lines that were not read when the person had left."""
    person = Person(*lines)
    monkeypatch.setattr("builtins.input", person)
    _talk(conversation, "echo")
    return person.lines


def test_ctrl_c_at_the_prompt_gives_a_hint_first(monkeypatch, conversation, capsys):
    assert talk(monkeypatch, conversation, None, "hey", None, None, "never") == ["never"]
    out, err = capsys.readouterr()
    assert "hey\n" in out and err.count("leaves") == 3


def test_ctrl_c_in_an_answer_keeps_what_was_shown(monkeypatch, conversation, capsys):
    def write(text):
        if text != "\n":
            raise KeyboardInterrupt

    monkeypatch.setattr("slotline.apis.cli.chat.write", write)
    assert talk(monkeypatch, conversation, "hello", None, "never") == ["never"]
    question, answer = conversation.messages
    assert question["content"] == "hello" and "hello".startswith(answer["content"])
    assert "stopped" in capsys.readouterr().err


def test_commands_of_the_conversation(monkeypatch, conversation, capsys):
    talk(monkeypatch, conversation, "one", "/clear", "/what", "/exit", "never")
    assert conversation.messages == []
    assert capsys.readouterr().err.count("/clear") == 2


def test_a_conversation_that_does_not_fit_is_refused(monkeypatch, conversation, capsys):
    assert talk(monkeypatch, conversation, "x" * 40_000, "y") == []
    assert "the context is" in capsys.readouterr().err
    assert [message["content"] for message in conversation.messages] == ["y", "y"]
