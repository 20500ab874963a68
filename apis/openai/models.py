"""Bodies of requests as pydantic models: strict types, no unknown field, one clear message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from slotline.apis.openai.errors import ApiError, shorten

# Accepted, because clients send them, and without any effect on the answer.
IRRELEVANT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # there are no tools, so there are no calls to be parallel
        "prompt_cache_key",
        "prompt_cache_retention",
        "renew_session",  # LMDeploy v0.1; a request of OpenAI's routes stands alone here
        "safety_identifier",
        "service_tier",
        "session_id",  # LMDeploy v0.1
        "store",
        "user",
    }
)

# Known to OpenAI's API and not supported: the values that ask for nothing are accepted.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


MAX_DEPTH = 64  # levels of lists and objects in a body


class Body(BaseModel):
    """What every body is: strict (true is not 1, "10" is not 10), and closed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, never added


class GenerationBody(Body):
    """Fields that both generation routes have; ranges are SamplingParams' business."""

    model: str
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    # Beyond OpenAI's, under the names that vLLM gave them.
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    top_k: int | None = None
    truncate_prompt_tokens: int | None = None

    # slotline's own.
    adapter: str | None = None
    extra: dict[str, Any] | None = None
    logprobs_mode: str | None = None

    # An engine's parameter -> the field of this route that sets it, where the names differ.
    renamed: ClassVar[Mapping[str, str]] = {}


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]  # which of the four forms, and of what, is checked by hand: lists are long
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ConversationBody(Body):
    """How messages become a prompt, wherever they do."""

    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class ChatBody(GenerationBody, ConversationBody):
    """Body of POST /v1/chat/completions."""

    messages: str | list[Any]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None

    renamed: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs", "prompt": "messages"}


T = TypeVar("T", bound=Body)


def parse(kind: type[T], data: bytes) -> T:
    """Read a body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {shorten(str(error))}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(raw)
    ignored = IRRELEVANT - kind.model_fields.keys()
    given = {name: value for name, value in raw.items() if value is not None and name not in ignored}
    _refuse_unsupported(given, kind)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from None


def _check_depth(raw: dict[str, Any]) -> None:
    """Refuse what is nested so deeply that templates, or its own repr in a message, could not follow."""
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _refuse_unsupported(given: dict[str, Any], kind: type[Body]) -> None:
    """Drop known fields that ask for nothing; refuse those that ask for something, and unknown ones."""
    for name in list(given):
        if name in kind.model_fields:
            continue
        value = given.pop(name)
        if name not in UNSUPPORTED:
            raise ApiError(400, f"unknown field {shorten(name)!r}", param=shorten(name), code="unknown_field")
        if value not in UNSUPPORTED[name]:
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")


_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}


def _first_error(error: ValidationError) -> ApiError:
    """Turn pydantic's findings into one sentence: field, value, what is allowed."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = str(path[0]) if path else None
    if first["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=field, code="missing_field")
    if first["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in first["loc"])
        return ApiError(400, f"unknown field {shorten(where)!r}", param=field, code="unknown_field")
    wanted = [_WANTED.get(found["type"], found["msg"]) for found in error.errors() if found["loc"][0] == field]
    allowed = " or ".join(dict.fromkeys(wanted))
    message = f"{_spelt(path)} is {shorten(repr(first['input']))}; allowed: {allowed}"
    return ApiError(400, message, param=field, code="invalid_parameter")


def _spelt(path: list[int | str]) -> str:
    """Return the path of a value inside a field, as in ``logit_bias.42`` or ``bad_words[3]``."""
    first, *rest = path
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest if part not in _ARMS)
    return f"{first}{inner}"


_ARMS = {"str", "bool", "int", "float"}  # pydantic puts the arm of a union it tried into the path
