"""Chat templates run in a Jinja sandbox, with the helpers that published templates expect."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slotline.errors import ChatTemplateError, ConfigError
from slotline.plugins.models.budget import (
    JOIN,
    TICK,
    check_call,
    check_format,
    check_length,
    checked_filter,
    guarded,
    joined,
)

MAX_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 10.0
_MAX_REPEAT = 1_000_000


class _Refusal(jinja2.TemplateError):
    """Raised by raise_exception: the template's own words."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks answers for training; here its body is simply shown."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses operators and calls that make something huge out of little."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(side, int | float) for side in (left, right))
        if operator == "**" and not (numbers and abs(left) <= 1e6 and abs(right) <= 32):
            raise jinja2.TemplateError("** is only for small numbers in a chat template")
        if operator == "*" and not numbers:
            times, what = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and times * len(what) > _MAX_REPEAT:
                raise jinja2.TemplateError("a chat template may not repeat a text that often")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            check_length(len(left) + len(right))
        if operator == "%":
            check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_call(function, args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes for HTML
    for name in ("center", "format", "indent", "replace", "wordwrap"):
        environment.filters[name] = checked_filter(name, environment.filters[name])
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def compile_template(text: str, where: str) -> Callable[[Mapping[str, Any]], str]:
    """Compile a chat template to a function from its variables to the prompt.

    The function raises ChatTemplateError when the template refuses the messages, fails, or takes
    more than MAX_SECONDS or MAX_CHARS.

    Args:
        text: Jinja source.
        where: the file or metadata key it came from, for messages.

    Raises:
        ConfigError: a syntax error, with file and line.
    """
    try:
        template = guarded(_environment(), text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template {where}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"chat template {where}: {error}") from error
    return lambda variables: _run(template, variables, where)


def _run(template: jinja2.Template, variables: Mapping[str, Any], where: str) -> str:
    parts: list[str] = []
    size, deadline = 0, time.monotonic() + MAX_SECONDS

    def tick() -> None:
        if time.monotonic() > deadline:
            raise _Refusal(f"it ran longer than {MAX_SECONDS:g} seconds")

    try:
        for part in template.generate({**variables, TICK: tick, JOIN: joined}):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARS:
                raise _Refusal(f"its output is longer than {MAX_CHARS} characters")
            tick()
    except _Refusal as error:
        raise ChatTemplateError(f"the chat template refuses the messages: {error}", param="messages") from error
    except Exception as error:  # a template can fail in as many ways as Python can
        reason = f"{type(error).__name__}: {error}"
        raise ChatTemplateError(f"chat template {where} fails on these messages: {reason}", param="messages") from error
    return "".join(parts)
