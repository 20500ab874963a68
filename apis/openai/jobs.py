"""From a body to what the engine is asked: prompts, sampling parameters, template options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotline.apis.openai.conversation import Conversation
from slotline.apis.openai.errors import ApiError
from slotline.apis.openai.models import ChatBody, CompletionBody, GenerationBody
from slotline.errors import InvalidParameter
from slotline.params import SamplingParams

Prompt = str | list[int] | list[dict[str, Any]]

COMPLETION_TOKENS = 16  # max_tokens of /v1/completions where it is not given, as in OpenAI's API

# Fields that mean the same in a body and in SamplingParams.
_SAME = (
    "allowed_token_ids",
    "bad_words",
    "extra",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs_mode",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, ready for the engine.

    Attributes:
        prompts: one or several; each is answered with ``params.n`` choices.
        conversation: where the prompt is one, with what its template is to be told.
        echo: show the prompt before the answer.
        echo_logprobs: the prompt's own logprobs were asked for through echo.
        shown: choices of each prompt that the answer has: the best of ``params.n`` where that is more.
        embed: vectors are wanted, and no text.
        hides_logprobs: logprobs are there to find the best choices, and nobody asked to see them.
    """

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    conversation: Conversation | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    echo: bool = False
    echo_logprobs: bool = False
    embed: bool = False
    shown: int = 1
    hides_logprobs: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


def completion_job(body: CompletionBody, cap: int) -> Job:
    """Translate a body of /v1/completions; ``cap`` is the most logprobs it may ask for."""
    _check_width("logprobs", body.logprobs, cap)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs, **_best_of(body)}
    scored = bool(body.echo) and body.logprobs is not None
    if scored and body.prompt_logprobs is None:
        own["prompt_logprobs"] = body.logprobs
    picks = "n" in own
    return _job(
        body,
        cap,
        prompts_of(body.prompt, "prompt"),
        own,
        echo=bool(body.echo),
        echo_logprobs=scored,
        hides_logprobs=picks and body.logprobs is None,
        renamed={**body.renamed, "n": "best_of"} if picks else None,
    )


def _best_of(body: CompletionBody) -> dict[str, Any]:
    """Return the parameters of a request that has more choices made than it wants to see."""
    shown, made = 1 if body.n is None else body.n, body.best_of
    if made is None or made == shown or shown < 1:
        return {}
    if made < shown:
        raise InvalidParameter.of("best_of", made, f"at least n ({shown})")
    if body.stream:
        message = f"best_of is {made}; allowed: the value of n ({shown}) in a stream, which cannot take back a choice"
        raise InvalidParameter(message, param="best_of")
    return {"n": made, "logprobs": body.logprobs or 0}


def chat_job(body: ChatBody, cap: int) -> Job:
    """Translate a body of /v1/chat/completions; ``cap`` is the most logprobs it may ask for."""
    _check_width("top_logprobs", body.top_logprobs, cap)
    conversation = Conversation.of(body.messages, body)
    own: dict[str, Any] = {"max_tokens": _chat_max_tokens(body)}
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        message = f"top_logprobs is {body.top_logprobs}; allowed: only with logprobs true, then 0 to {cap}"
        raise InvalidParameter(message, param="top_logprobs")
    renamed = dict(body.renamed)
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return _job(body, cap, [conversation.messages], own, conversation=conversation, renamed=renamed)


def _job(
    body: GenerationBody,
    cap: int,
    prompts: Sequence[Prompt],
    own: dict[str, Any],
    *,
    conversation: Conversation | None = None,
    echo: bool = False,
    echo_logprobs: bool = False,
    hides_logprobs: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> Job:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is given; allowed: only with stream true", param="stream_options")
    _check_width("prompt_logprobs", body.prompt_logprobs, cap)
    names = body.renamed if renamed is None else renamed
    return Job(
        model=body.model,
        prompts=prompts,
        params=_sampling(body, own, names),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        conversation=conversation,
        adapter=body.adapter,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        echo=echo,
        echo_logprobs=echo_logprobs,
        shown=1 if body.n is None else body.n,
        hides_logprobs=hides_logprobs,
        renamed=names,
    )


def _check_width(name: str, width: int | None, cap: int) -> None:
    """Refuse a number of logprobs by the server's own limit: that of SamplingParams is wider."""
    if width is not None and not 0 <= width <= cap:
        advice = "The server's max_logprobs sets this limit." if width > cap else ""
        raise InvalidParameter.of(name, width, f"0 to {cap}", advice)


def _sampling(body: GenerationBody, own: dict[str, Any], renamed: Mapping[str, str]) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given |= {name: value for name, value in own.items() if value is not None}
    if body.stop is not None and body.stop is not False:  # LMDeploy v0.1 clients send "stop": false
        given["stop"] = body.stop
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    try:
        return SamplingParams(**given)
    except InvalidParameter as error:
        field_name = renamed.get(error.param or "", error.param)
        message = error.message.replace(str(error.param), str(field_name)) if field_name else error.message
        raise InvalidParameter(message, param=field_name) from None


def _token_id(key: str) -> int:
    """Read a key of logit_bias; JSON has no other keys than strings."""
    if not key.isascii() or not key.isdigit() or len(key) > 10 or key != str(int(key)):  # "05" would be another "5"
        raise InvalidParameter.of("logit_bias", key, 'token ids as keys, such as "198"')
    return int(key)


def _chat_max_tokens(body: ChatBody) -> int | None:
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ApiError(
            400,
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens is {body.max_tokens}; "
            "allowed: one of them, or the same value",
            param="max_completion_tokens",
        )
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def prompts_of(prompt: str | list[Any], name: str) -> list[Prompt]:
    """Read the four forms of a prompt: text, texts, token ids, lists of token ids.

    Raises:
        InvalidParameter: by the name of the field that has them.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameter.of(name, prompt, "a text, token ids, or a list of these that is not empty")
    kind = type(prompt[0])
    if kind is int:
        _all_of(prompt, int, name, "token ids, or texts, not mixed")
        return [prompt]
    if kind is list:
        _all_of(prompt, list, name, "lists of token ids, not mixed with anything else")
        for number, ids in enumerate(prompt):
            _all_of(ids, int, f"{name}[{number}]", "token ids")
        return list(prompt)
    _all_of(prompt, str, name, "texts, token ids, or lists of token ids, not mixed")
    return list(prompt)


def _all_of(items: list[Any], kind: type, where: str, allowed: str) -> None:
    """Refuse a list with an item of another type; ``true`` is not the token 1."""
    position = next((i for i, item in enumerate(items) if type(item) is not kind), None)
    if position is not None:
        error = InvalidParameter.of(f"{where}[{position}]", items[position], allowed)
        raise InvalidParameter(error.message, param=where.partition("[")[0])
