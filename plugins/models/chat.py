"""Messages to a prompt: the template, and the guard that keeps typed control tokens text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slotline.errors import InvalidParameter
from slotline.model import Message
from slotline.plugins.models.messages import map_strings, normalise
from slotline.plugins.models.sandbox import compile_template
from slotline.plugins.models.tokenizer import ControlToken, FastTokenizer

# Names a template gets from slotline; a request's own variables may not replace them.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)
_PRIVATE_USE = range(0xE000, 0xF8FF)


class TemplateChat:
    """A `slotline.model.ChatFormat` from a Jinja template.

    Args:
        template: Jinja source.
        where: where the source came from, for messages.
        tokenizer: the model's.
        add_begin: put the tokenizer's own begin token first, where it has one and the template does not write it.
            Templates that come with a model are complete as they are.

    Raises:
        ConfigError: the template has a syntax error, with file and line.
    """

    def __init__(self, template: str, where: str, tokenizer: FastTokenizer, *, add_begin: bool = False) -> None:
        self._run = compile_template(template, where)
        self._knows_developer = "developer" in template
        self._source = template
        self._tokenizer = tokenizer
        self._begin = tokenizer.begin_ids if add_begin and "bos_token" not in template else []
        controls = tokenizer.controls.values()
        self._controls = _Spellings([token.spelling for token in controls])
        self._special = _Spellings([token.spelling for token in controls if token.special])

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt text, as the model was trained to see it.

        Args:
            messages: OpenAI-shaped messages, at least one.
            add_generation_prompt: end with the start of an answer.
            variables: further template variables, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template refuses the messages, with its own words.
            InvalidParameter: a message or a variable is not allowed.
        """
        checked = _check_variables(variables)
        return self._render(self._normalise(messages), add_generation_prompt, checked)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Return the prompt's ids; control tokens spelt in messages or variables stay text.

        Otherwise they are the ids of the rendered text. Templates write their own begin token. In the
        assistant's answers, tokens that are not flagged special (``<think>``) stay what the template makes of them.

        Raises:
            ChatTemplateError: the template refuses the messages, with its own words.
            InvalidParameter: a message or a variable is not allowed.
        """
        checked = _check_variables(variables)
        plain = self._normalise(messages)
        mark = _unused_char([self._source, *_strings([plain, checked])])
        broken = [self._broken(message, mark) for message in plain]
        safe = map_strings(checked, lambda text: self._controls.broken(text, mark))
        text = self._render(broken, add_generation_prompt, safe)
        pieces = _split(text, self._tokenizer)
        return self._begin + self._tokenizer.encode_pieces(
            [p.replace(mark, "") if isinstance(p, str) else p for p in pieces]
        )

    def _broken(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """Return the message with its control tokens broken, its role as it is."""
        spellings = self._special if message["role"] == "assistant" else self._controls
        changed = {key: map_strings(value, lambda text: spellings.broken(text, mark)) for key, value in message.items()}
        return {**changed, "role": message["role"]}

    def _normalise(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        plain = normalise(messages)
        if not self._knows_developer:
            for message in plain:  # the newer name of the same role
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        return plain

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        special = self._tokenizer.special
        return self._run(
            {
                **variables,
                "messages": messages,
                "tools": None,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": special.bos,
                "eos_token": special.eos,
            }
        )


def _check_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in variables:
        if name in RESERVED:
            error = InvalidParameter.of(name, variables[name], "nothing: a request may not set it", "Leave it out.")
            error.param = "chat_template_kwargs"
            raise error
    return variables


class _Spellings:
    """Breaks control tokens spelt in text with a mark that occurs nowhere else.

    A template sees the mark inside such spellings only, so what it does with other text is untouched.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        places = "|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in spellings)
        self._inside = re.compile(places or r"(?!)")
        self._starts = {s[:n] for s in spellings for n in range(1, len(s))}
        self._longest = max(map(len, spellings), default=0)

    def broken(self, text: str, mark: str) -> str:
        """Return ``text`` with ``mark`` behind the first character of each spelling.

        A text that ends with a part of one gets the mark behind it, lest the next text completes it.
        """
        ends = (text[-n:] for n in range(1, min(self._longest, len(text) + 1)))
        return self._inside.sub(mark, text) + (mark if any(end in self._starts for end in ends) else "")


def _unused_char(texts: Sequence[str]) -> str:
    """Return a private-use character that no text holds."""
    used = set().union(*texts)
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise InvalidParameter(
            "messages use every private-use character of Unicode (U+E000 to U+F8FE); leave one of them out",
            param="messages",
        )
    return free


def _strings(value: object) -> list[str]:
    """Return every string within a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for side in pair for text in _strings(side)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def _split(text: str, tokenizer: FastTokenizer) -> Iterator[str | ControlToken]:
    """Cut rendered text at its control tokens, with the white space that some of them swallow."""
    at, swallow = 0, False
    for match in tokenizer.control_pattern.finditer(text):
        token = tokenizer.controls[match.group()]
        before = text[at : match.start()]
        before = before.lstrip() if swallow else before
        yield before.rstrip() if token.lstrip else before
        yield token
        at, swallow = match.end(), token.rstrip
    rest = text[at:]
    yield rest.lstrip() if swallow else rest
