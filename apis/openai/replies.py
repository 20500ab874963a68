"""JSON schemas of answers, as OpenAPI 3.0 has them. All but errors may get more fields one day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
MAYBE_TEXT: Schema = {"type": "string", "nullable": True}
OBJECT: Schema = {"type": "object"}
MAYBE_OBJECT: Schema = {"type": "object", "nullable": True}
REASON: Schema = {"type": "string", "nullable": True, "enum": ["stop", "length", None]}


def of(fields: Mapping[str, Schema], *optional: str) -> Schema:
    """Return the schema of an object that has these fields, but for those that are optional."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": dict(fields), "required": required}


def many(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def ref(name: str) -> Schema:
    """Return a reference to one of the schemas below."""
    return {"$ref": f"#/components/schemas/{name}"}


def constant(value: str) -> Schema:
    """Return the schema of one text."""
    return {"type": "string", "enum": [value]}


def _answer(kind: str, choice: Schema) -> Schema:
    head = {"id": TEXT, "object": constant(kind), "created": COUNT, "model": TEXT}
    return of({**head, "choices": many(choice), "usage": ref("Usage"), "warnings": many(ref("Warning"))}, "warnings")


_CHOICE = {"index": COUNT, "logprobs": MAYBE_OBJECT, "finish_reason": REASON, "stop_reason": {"nullable": True}}
_MESSAGE = of({"role": constant("assistant"), "content": TEXT, "refusal": MAYBE_TEXT})
_TURN = {
    "text": TEXT,
    "tokens": COUNT,
    "input_tokens": COUNT,
    "history_tokens": COUNT,
    "finish_reason": REASON,
    "cached_tokens": COUNT,
    "warnings": many(ref("Warning")),
}
_CARD = {"id": TEXT, "object": constant("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT}
_EMBEDDING = {"object": constant("embedding"), "index": COUNT, "embedding": {}}

SCHEMAS: Mapping[str, Schema] = {
    "Aborted": of({"aborted": COUNT}),
    "Capabilities": OBJECT,
    "ChatCompletion": _answer("chat.completion", of({**_CHOICE, "message": _MESSAGE}, "stop_reason")),
    "Completion": _answer("text_completion", of({**_CHOICE, "text": TEXT}, "stop_reason")),
    "Embeddings": of({"object": constant("list"), "data": many(of(_EMBEDDING)), "model": TEXT, "usage": OBJECT}),
    "Error": {
        **of({"error": of({"message": TEXT, "type": TEXT, "param": MAYBE_TEXT, "code": MAYBE_TEXT})}),
        "additionalProperties": False,
    },
    "Health": of({"status": TEXT, "detail": TEXT}),
    "Model": of(_CARD),
    "Models": of({"object": constant("list"), "data": many(ref("Model"))}),
    "Text": of({"prompt": TEXT}),
    "Tokens": of(
        {"count": COUNT, "max_model_len": COUNT, "tokens": many(COUNT), "token_strs": {**many(TEXT), "nullable": True}}
    ),
    "Turn": of(_TURN, "cached_tokens", "warnings"),
    "Usage": of(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": of({"cached_tokens": COUNT}),
        }
    ),
    "Warning": of({"code": TEXT, "param": TEXT, "message": TEXT}),
}
