"""JSON schemas of the fields of bodies, as OpenAPI 3.0 has them: types and ranges, for one engine.

A test asks the server whether it holds to them, and whether it has any field that is not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slotline.apis.openai.messages import MAX_MESSAGES, PASSED_ON, ROLES
from slotline.apis.openai.models import IRRELEVANT, UNSUPPORTED, Body
from slotline.apis.openai.service import logprob_cap
from slotline.backend import HARD_PARAMS
from slotline.engine import Engine
from slotline.params import LOGPROBS_MODES, MAX_BAD_WORDS, MAX_BIAS, MAX_N, MAX_STOP_CHARS, MAX_STOPS

Schema = dict[str, Any]

ANY: Schema = {}
FLAG: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}


def number(low: float, high: float, *, open_low: bool = False) -> Schema:
    """Return the schema of a number in a range."""
    schema: Schema = {"type": "number", "minimum": low, "maximum": high}
    return {**schema, "exclusiveMinimum": True} if open_low else schema


def integer(low: int | None = None, high: int | None = None) -> Schema:
    """Return the schema of an integer in a range."""
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}


def listed(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list."""
    schema: Schema = {"type": "array", "items": items, "minItems": least}
    return schema if most is None else {**schema, "maxItems": most}


def closed(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Return the schema of an object that has no other fields."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    names = sorted(required)
    return {**schema, "required": names} if names else schema


def nullable(schema: Schema) -> Schema:
    """Return the schema with null beside it, which means: not given."""
    kinds = {"type", "anyOf", "oneOf"} & schema.keys()
    if not kinds:
        return schema
    allowed = {**schema, "nullable": True}
    return {**allowed, "enum": [*schema["enum"], None]} if "enum" in schema else allowed


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that one of several fits."""
    return {"anyOf": list(schemas)}


def message_schema() -> Schema:
    """Return the schema of one message of a conversation."""
    part = closed({"type": {"type": "string", "enum": ["text"]}, "text": TEXT}, ("type", "text"))
    passed = {name: nullable(TEXT if kind is str else listed(ANY)) for name, kind in PASSED_ON.items()}
    content = either({**TEXT, "nullable": True}, listed(part))
    return closed({"role": {"type": "string", "enum": sorted(ROLES)}, "content": content, **passed}, ("role",))


MESSAGES = either(TEXT, listed({"$ref": "#/components/schemas/Message"}, least=1, most=MAX_MESSAGES))


def field_schemas(engine: Engine, names: Iterable[str]) -> dict[str, Schema]:
    """Return the schema of every field that a body may have; ``names`` are those of the model."""
    token = integer(0, engine.info.vocab_size - 1)
    length = integer(0, engine.max_model_len)
    width = integer(0, logprob_cap(engine))
    stop = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    stops = listed(stop, most=MAX_STOPS)
    token_lists = listed(listed(token, least=1), least=1)
    processors = {name: ANY for name in sorted(engine.capabilities.processors)}
    return {
        "model": {"type": "string", "enum": list(names)},
        "messages": MESSAGES,
        "prompt": either(TEXT, listed(TEXT, least=1), listed(token, least=1), token_lists),
        "add_generation_prompt": FLAG,
        "allowed_token_ids": listed(token),
        "bad_words": either(listed(stop, most=MAX_BAD_WORDS)),
        "best_of": integer(1, MAX_N),
        "cache_salt": {"type": "string", "minLength": 1},
        "chat_template_kwargs": OBJECT,
        "continue_final_message": FLAG,
        "echo": FLAG,
        "extra": closed(processors),
        "frequency_penalty": number(-2, 2),
        "ignore_eos": FLAG,
        "include_stop_str_in_output": FLAG,
        "logit_bias": {**OBJECT, "additionalProperties": number(-100, 100), "maxProperties": MAX_BIAS},
        "logprobs": width,
        "logprobs_mode": {"type": "string", "enum": list(engine.capabilities.logprobs_modes or LOGPROBS_MODES)},
        "max_completion_tokens": length,
        "max_tokens": length,
        "min_p": number(0, 1),
        "min_tokens": length,
        "n": integer(1, MAX_N),
        "presence_penalty": number(-2, 2),
        "priority": integer(-(2**31), 2**31 - 1),
        "prompt_logprobs": width,
        "repetition_penalty": number(0.01, 10),
        "seed": integer(-(2**63), 2**64 - 1),
        "skip_special_tokens": FLAG,
        "stop": either(stop, stops, {"type": "boolean", "enum": [False]}),
        "stop_token_ids": listed(token),
        "stream": FLAG,
        "stream_options": closed({"include_usage": nullable(FLAG), "include_obfuscation": nullable(FLAG)}),
        "temperature": number(0, 2),
        "top_k": integer(-1),
        "top_logprobs": width,
        "top_p": number(0, 1, open_low=True),
        "truncate_prompt_tokens": either(integer(1), {"type": "integer", "enum": [-1]}),
    }


def body_schema(
    body: type[Body],
    fields: Mapping[str, Schema],
    engine: Engine,
    *,
    without: Iterable[str] = (),
    needs: Iterable[str] = (),
    **own: Schema,
) -> Schema:
    """Return the schema of a body: its own fields, those without effect, those that may only ask for nothing.

    Args:
        fields: schemas by name.
        engine: fields that its backend would refuse are left out.
        without: further fields to leave out.
        needs: fields that are required, beside those that always are.
        own: schemas of fields that are another thing in this body.
    """
    refused = (HARD_PARAMS - engine.capabilities.params) | {"adapter"} | set(without)
    required = [name for name, field in body.model_fields.items() if field.is_required()] + list(needs)
    properties = {}
    for name in body.model_fields:
        if name not in refused:
            schema = own.get(name) or fields[name]
            properties[name] = schema if name in required else nullable(schema)
    for name in sorted(IRRELEVANT - properties.keys()):
        properties[name] = {"description": "Accepted, without effect."}
    for name, values in sorted(UNSUPPORTED.items()):
        properties.setdefault(name, {"description": "Not supported.", "nullable": True, "enum": [*values, None]})
    return closed(properties, required)
