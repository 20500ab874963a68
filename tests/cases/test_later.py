"""The cases TC-* and SO-*: until there are tools and structured output, asking for them is refused by name."""

from __future__ import annotations

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["red", "green"]}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [False, True])
def test_tc_tools_are_refused_by_name(server, fields, stream):
    error = server.refused("chat", messages=HELLO, max_tokens=4, stream=stream, **fields)
    assert error["param"] == next(iter(fields)) and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tool_choice": "none"}, {"function_call": "none"}, {"functions": []}]
)
def test_tc_asking_for_no_tools_is_no_matter(server, fields):
    plain = server.ask("chat", messages=HELLO, max_tokens=4, temperature=0)
    assert server.ask("chat", messages=HELLO, max_tokens=4, temperature=0, **fields).text == plain.text


FORMS = [
    SCHEMA,
    {"type": "json_object"},
    {"type": "xml"},
    {"type": "json_schema"},
    {},
    "text",
    {"type": "text", "x": 1},
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_so_formats_are_refused_by_name(server, form, route):
    prompt = {"messages": HELLO} if route == "chat" else {"prompt": "x"}
    assert server.refused(route, **prompt, max_tokens=4, response_format=form)["param"] == "response_format"


def test_so_11_text_is_as_if_it_were_absent(server):
    plain = server.ask("chat", messages=HELLO, max_tokens=4, temperature=0)
    asked = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "response_format": {"type": "text"}}
    assert server.ask("chat", **asked).text == plain.text
