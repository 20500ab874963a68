"""The OpenAPI document: what this server takes and gives, by its model, backend and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import slotline
from slotline.apis.native.abort import AbortBody
from slotline.apis.native.bodies import InteractiveBody
from slotline.apis.native.tokens import OF_MESSAGES, OF_TEXTS, DetokenizeBody, TokenizeBody
from slotline.apis.openai import replies
from slotline.apis.openai.embeddings import EmbeddingBody
from slotline.apis.openai.models import ChatBody, CompletionBody
from slotline.apis.openai.schemas import (
    FLAG,
    MESSAGES,
    TEXT,
    Schema,
    body_schema,
    either,
    field_schemas,
    integer,
    listed,
    message_schema,
)
from slotline.engine import Engine

ERRORS = {
    "400": "the request is wrong; the message names field, value and what is allowed",
    "401": "the API key is missing or wrong",
    "404": "the model, or the path, is not served",
    "408": "the body did not arrive in time",
    "409": "the session is answering another request",
    "413": "the body is too long",
    "415": "the body is not declared as JSON",
    "429": "this client is at its limit",
    "499": "the request was aborted by somebody else",
    "500": "the engine failed in this request",
    "503": "the queue is full, the model is loading, or the engine is broken",
    "504": "the answer took too long",
}
REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Returned, named in the log, and good for /abort.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
}


def document(engine: Engine, names: Sequence[str], root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.0 document of the routes over one engine.

    Args:
        engine: whose capabilities decide which fields are there.
        names: under which its model is served.
        root_path: where the routes are mounted.
    """
    return {
        "openapi": "3.0.3",
        "info": {"title": "slotline", "version": slotline.__version__, "description": _about(engine, names)},
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {"key": []}],
        "paths": {**_posts(engine, names), **_gets()},
        "components": {
            "schemas": {"Message": message_schema(), **replies.SCHEMAS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _about(engine: Engine, names: Sequence[str]) -> str:
    listed_names = ", ".join(names)
    return f"Serves {listed_names} on the {engine.config.backend} backend, {engine.max_model_len} tokens of context."


def _posts(engine: Engine, names: Sequence[str]) -> dict[str, Any]:
    fields = field_schemas(engine, names)
    token = integer(0, engine.info.vocab_size - 1)
    chat = body_schema(ChatBody, fields, engine, logprobs=FLAG)
    text = body_schema(CompletionBody, fields, engine)
    detokenize = {"tokens": listed(token, most=engine.max_model_len)}
    turns = _interactive(InteractiveBody, fields, engine)
    embed = {"input": fields["prompt"], "encoding_format": {"type": "string", "enum": ["float", "base64"]}}
    embed["dimensions"] = integer(1)
    posts = {
        "/v1/chat/completions": _post("Answer a conversation", chat, "ChatCompletion", "text/event-stream"),
        "/v1/completions": _post("Continue texts or token ids", text, "Completion", "text/event-stream"),
        "/v1/embeddings": _post("Embed texts", body_schema(EmbeddingBody, fields, engine, **embed), "Embeddings"),
        "/v1/chat/interactive": _post("Answer the next turn of a session", turns, "Turn", "application/x-ndjson"),
        "/generate": _post("The same, by its older name", turns, "Turn", "application/x-ndjson"),
        "/tokenize": _post("Show the tokens of a text or a conversation", _tokenize(fields, engine), "Tokens"),
        "/detokenize": _post(
            "Show the text of tokens", body_schema(DetokenizeBody, fields, engine, **detokenize), "Text"
        ),
        "/abort": _post("End an answer", _abort(fields, engine), "Aborted"),
    }
    for path, example in _examples(names[0]).items():
        posts[path]["post"]["requestBody"]["content"]["application/json"]["example"] = example
    return posts


def _examples(model: str) -> dict[str, Any]:
    """Return a short request of each kind; a page that makes one up from the schema asks for everything at once."""
    messages = [{"role": "user", "content": "Name three rivers."}]
    turn = {"prompt": "Name three rivers.", "session_id": 1, "request_output_len": 16}
    return {
        "/v1/chat/completions": {"model": model, "messages": messages, "max_tokens": 16},
        "/v1/completions": {"model": model, "prompt": "Once upon a time", "max_tokens": 16},
        "/v1/embeddings": {"model": model, "input": "Once upon a time"},
        "/v1/chat/interactive": turn,
        "/generate": turn,
        "/tokenize": {"prompt": "Once upon a time"},
        "/detokenize": {"tokens": [72, 105]},
        "/abort": {"request_id": "the-id-of-a-request"},
    }


def _tokenize(fields: Mapping[str, Schema], engine: Engine) -> Schema:
    """Return the schema of a text, or of messages: each has options of its own."""
    own = {name: FLAG for name in (*OF_TEXTS, "return_token_strs")} | {"prompt": TEXT}
    text = body_schema(TokenizeBody, fields, engine, without=("messages", *OF_MESSAGES), needs=["prompt"], **own)
    messages = body_schema(TokenizeBody, fields, engine, without=("prompt", *OF_TEXTS), needs=["messages"], **own)
    return either(text, messages)


def _abort(fields: Mapping[str, Schema], engine: Engine) -> Schema:
    """Return the schema of one id or the other."""
    own = {"request_id": TEXT, "session_id": integer()}
    others = [("request_id", "session_id"), ("session_id", "request_id")]
    return either(
        *(body_schema(AbortBody, fields, engine, without=[other], needs=[one], **own) for one, other in others)
    )


def _interactive(body: type[InteractiveBody], fields: Mapping[str, Schema], engine: Engine) -> Schema:
    flags = ("cancel", "interactive_mode", "renew_session", "sequence_end", "sequence_start")
    own = {name: FLAG for name in flags} | {"session_id": integer(), "request_output_len": integer(0)}
    one, several, _ = fields["stop"]["anyOf"]
    stop = either({**one, "minLength": 0}, several, FLAG)  # "" is none, too
    return body_schema(body, fields, engine, prompt=MESSAGES, stop=stop, **own)


def _gets() -> dict[str, Any]:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models": _get("List the names of the model", "Models"),
        "/v1/models/{model}": {**_get("Show one of them", "Model"), "parameters": [name]},
        "/v1/capabilities": _get("Show what a request may ask for", "Capabilities"),
        "/health": _get("Tell whether requests can be answered", "Health", "503"),
        "/health/ready": _get("The same", "Health", "503"),
        "/health/live": _get("Tell whether the process should be left alone", "Health", "503"),
        "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": {"200": _content("text/plain", TEXT)}}},
    }


def _post(summary: str, body: Schema, answer: str, streamed: str | None = None) -> dict[str, Any]:
    good = _answer(answer)
    if streamed is not None:
        good["content"][streamed] = {}  # some tools take a schema here for the body's, some for that of an event
    operation = {
        "summary": summary,
        "parameters": [REQUEST_ID],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": good, **{status: _error(why) for status, why in ERRORS.items()}},
    }
    return {"post": operation}


def _get(summary: str, answer: str, unwell: str | None = None) -> dict[str, Any]:
    good = _answer(answer)
    bad = {status: _error(ERRORS[status]) for status in ("401", "404", "503")}
    if unwell is not None:
        bad[unwell] = good
    return {"get": {"summary": summary, "responses": {"200": good, **bad}}}


def _answer(name: str) -> dict[str, Any]:
    return _content("application/json", {"$ref": f"#/components/schemas/{name}"})


def _error(why: str) -> dict[str, Any]:
    return {**_answer("Error"), "description": why}


def _content(kind: str, schema: Schema) -> dict[str, Any]:
    return {"description": "the answer", "content": {kind: {"schema": schema}}}
