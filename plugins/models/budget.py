"""What keeps a chat template within its time and memory where it writes nothing.

A template's output is watched while it comes. A loop or a macro that writes nothing could run for ever, and a text
can be doubled out of sight; so each turn of a loop and each call of a macro looks at the clock, and what joins, pads,
repeats or formats texts looks at the length first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_TEXT = 16 * 1024 * 1024  # characters of one text inside a template
_PADS = frozenset({"center", "expandtabs", "ljust", "replace", "rjust", "zfill"})
_WIDE = re.compile(r"\d{7}")  # a width or precision of millions, in either kind of format
_WIDTH_FROM_ELSEWHERE = re.compile(r"%[-+ #0]*\d*\.?\*|\{[^{}]*\{")
Body = TypeVar("Body", nodes.For, nodes.Macro, nodes.CallBlock)
TICK = "_slotline_tick"
JOIN = "_slotline_join"


class _Guard(NodeTransformer):
    """Put a look at the clock at the start of every loop and macro, and a look at the length into every ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call(JOIN, node.nodes, node.lineno)

    def _ticking(self, node: Body) -> Body:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(TICK, [], node.lineno), lineno=node.lineno))
        return node


def guarded(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """Compile a template that calls TICK and JOIN, which whoever runs it hands over."""
    tree = _Guard().visit(environment.parse(source))
    tree.set_environment(environment)
    return jinja2.Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def joined(*parts: Any) -> str:
    """Join texts, as ``~`` does.

    Raises:
        jinja2.TemplateError: the whole is too long.
    """
    texts = [str(part) for part in parts]
    check_length(sum(map(len, texts)))
    return "".join(texts)


def check_length(count: int) -> None:
    """Refuse a text before it is made.

    Raises:
        jinja2.TemplateError: it would be too long.
    """
    if count > MAX_TEXT:
        raise jinja2.TemplateError(f"a text inside the template would be longer than {MAX_TEXT} characters")


def check_format(text: Any) -> None:
    """Refuse a format that pads to millions of characters, or to a width that comes from elsewhere."""
    if isinstance(text, str) and (_WIDE.search(text) or _WIDTH_FROM_ELSEWHERE.search(text)):
        raise jinja2.TemplateError("a chat template may not format a text that wide")


def check_call(function: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse a method of a text whose result would be too long."""
    text = getattr(function, "__self__", None)
    if not isinstance(text, str) or getattr(function, "__name__", "") not in _PADS:
        return
    widths = [value for value in arguments if isinstance(value, int)]
    check_length(max(widths, default=0))
    if function.__name__ == "expandtabs":
        check_length(text.count("\t") * max(widths, default=8) + len(text))
    if function.__name__ == "replace" and len(arguments) > 1:
        old, new = str(arguments[0]), str(arguments[1])
        check_length((text.count(old) if old else len(text) + 1) * len(new) + len(text))


def checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that looks at the numbers and texts it is given first."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        value, *given = arguments[hasattr(function, "jinja_pass_arg") :]  # some get one of Jinja's own first
        given += named.values()
        check_length(max((v for v in given if isinstance(v, int)), default=0) * (str(value).count("\n") + 1))
        if name == "format":
            check_format(value)
        if name == "replace":
            check_call(str(value).replace, tuple(given))
        return function(*arguments, **named)

    return run


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=lineno), arguments, [], None, None, lineno=lineno)
