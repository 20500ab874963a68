"""``slotline chat``: a conversation in the terminal, or one answer for each line that is piped in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from slotline.apis.cli.console import make_streams_safe, say, write
from slotline.apis.cli.options import engine_options, sampling_options
from slotline.apis.cli.session import Session, open_session
from slotline.config import EngineConfig
from slotline.errors import RequestError
from slotline.params import SamplingParams

LONGEST_ANSWER = 1024
HELP = "/clear forgets the conversation, /exit leaves; Ctrl-C stops an answer"


class Conversation:
    """The messages so far, and what answers them."""

    def __init__(self, session: Session, sampling: dict[str, Any], system: str | None) -> None:
        self._session = session
        self._sampling = sampling
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer to ``text`` in pieces; what was shown of it stays in the conversation.

        Raises:
            RequestError: the conversation does not fit; it is as it was before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._session.chat_prompt(asked)
        room = self._session.engine.max_model_len - len(prompt)
        if room < 1:
            longest = self._session.engine.max_model_len
            raise RequestError(f"the conversation has {len(prompt)} tokens; the context is {longest}")
        params = SamplingParams(**{**self._sampling, "max_tokens": min(room, self._sampling["max_tokens"])})
        shown: list[str] = []
        try:
            for piece in self._session.stream(prompt, params):
                shown.append(piece)
                yield piece
        finally:
            if shown:
                self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]


@click.command()
@engine_options(without=("seed",))
@sampling_options(max_tokens=LONGEST_ANSWER)
@click.option("--system", help="System message of the conversation.")
def chat(config: EngineConfig, sampling: dict[str, Any], system: str | None) -> None:
    """Talk to MODEL.

    Where stdin is piped, each line of it is a turn of one conversation, answers are greedy unless
    an option says otherwise, and stdout has the answers alone.
    """
    make_streams_safe()
    interactive = sys.stdin.isatty()
    with open_session(config) as session:
        if not interactive and "temperature" in session.engine.capabilities.params:
            sampling.setdefault("temperature", 0.0)
        conversation = Conversation(session, sampling, system)
        if interactive:
            _talk(conversation, session.engine.model.name)
        else:
            _answer_lines(conversation)


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if text := line.strip():
            for piece in conversation.answer(text):
                write(piece)
            write("\n")


def _talk(conversation: Conversation, name: str) -> None:
    """Read and answer until the person leaves: /exit, Ctrl-D, or Ctrl-C twice."""
    _enable_line_editing()
    say(f"{name}; {HELP}")
    leaving = False  # the next Ctrl-C leaves
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            if leaving:
                return
            leaving = True
            say("Ctrl-C again, or Ctrl-D, leaves")
            continue
        if text in ("/exit", "/quit"):
            return
        leaving = bool(text) and not _turn(conversation, text)


def _turn(conversation: Conversation, text: str) -> bool:
    """Answer one line; return False where Ctrl-C stopped the answer."""
    if text == "/clear":
        conversation.clear()
        return True
    if text.startswith("/"):
        say(HELP)
        return True
    answer = conversation.answer(text)
    try:
        for piece in answer:
            write(piece)
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]  # a generator: this aborts the request
        say("\nstopped; Ctrl-C again leaves")
        return False
    except RequestError as error:
        say(f"{error.message}; /clear forgets the conversation", "red")
        return True
    write("\n")
    return True


def _enable_line_editing() -> None:
    """Give input() arrow keys and history, where Python was built with readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
