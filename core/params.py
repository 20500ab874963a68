"""SamplingParams: what a caller may ask of one request, and how defaults are filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from slotline.errors import InvalidParameter

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BIAS = 4096
LOGPROBS_CEILING = 1024
LOGPROBS_MODES = ("raw", "processed")
GREEDY_BELOW = 1e-5  # a temperature under this is treated as 0: logits / t would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Say how one request is sampled. ``None`` means: not given.

    A field that is not given takes the model's generation_config value, then the neutral
    value (temperature 1, top_p 1, top_k off, penalties off).

    Args:
        max_tokens: most tokens to generate; None runs to the end of the context.
        min_tokens: end tokens, stop ids and stop strings count only from here on.
        temperature: 0 to 2; 0 is greedy.
        top_p: nucleus mass, 0 < top_p <= 1.
        top_k: keep the k best; 0 or -1 is off.
        min_p: drop tokens below min_p times the best probability, 0 to 1.
        repetition_penalty: divide/multiply logits of seen tokens (prompt and output), 0.01 <= r <= 10.
        presence_penalty: subtract once per seen output token, -2 to 2.
        frequency_penalty: subtract per occurrence in the output, -2 to 2.
        seed: 64-bit seed; random if not given.
        n: how many choices.
        stop: strings that end the answer; they are not shown unless include_stop_str_in_output.
        stop_token_ids: ids that end the answer, beside the model's end tokens.
        include_stop_str_in_output: show the stop string that matched.
        skip_special_tokens: leave special tokens out of the text.
        bad_words: strings the model must not produce.
        allowed_token_ids: sample only among these.
        logit_bias: id -> -100..100, added to the logits.
        ignore_eos: go on past the model's end tokens.
        logprobs: number of alternatives per sampled token; 0 gives the sampled token alone.
        prompt_logprobs: the same for prompt positions.
        truncate_prompt_tokens: keep only that many tokens of a longer prompt, its last ones; -1 keeps what
            fits beside max_tokens. Never done unless asked for, and told in a warning.
        logprobs_mode: "raw" (of the model's own logits) or "processed" (after all of the above).
        constraint: structured-output constraint, for backends that have it.
        extra: options of samplers and logits processors from plugins, by plugin name.

    Raises:
        InvalidParameter: naming the field, its value and the allowed range.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int = 1
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    truncate_prompt_tokens: int | None = None
    constraint: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter.of("min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")

    def given(self) -> frozenset[str]:
        """Return the names of the fields that differ from 'not given'."""
        return frozenset(name for name, neutral in _NEUTRAL.items() if getattr(self, name) != neutral)

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return a copy in which every numeric field has a value.

        Args:
            defaults: the model's generation_config values, by the names used here.
        """
        made = object.__new__(type(self))  # what was checked once is not checked again: it is done for every request
        for name in _NEUTRAL:
            value = getattr(self, name)
            if value is None and name in _FALLBACK:
                value = defaults.get(name, _FALLBACK[name])
                value = value if value is None else _CHECKS[name](name, value)
            object.__setattr__(made, name, value)
        made._check_lengths()
        return made

    @property
    def greedy(self) -> bool:
        """Tell whether the most likely token is always taken."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[str, Any], float]:
    sign = "<" if open_low else "<="

    def check(name: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high or (open_low and value == low):  # NaN is in no range
            raise InvalidParameter.of(name, value, f"a number, {low:g} {sign} {name} <= {high:g}")
        return float(value)

    return check


def _integer(low: int, high: int | None = None, *, advice: str = "") -> Callable[[str, Any], int]:
    allowed = f"an integer, at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(name: str, value: Any) -> int:
        fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits or value < low or (high is not None and value > high):
            raise InvalidParameter.of(name, value, allowed, advice)
        return int(value)

    return check


def _truncation(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise InvalidParameter.of(name, value, "an integer, at least 1, or -1 for what fits")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter.of(name, value, "true or false")
    return value


def _strings(limit: int) -> Callable[[str, Any], tuple[str, ...] | None]:
    def check(name: str, value: Any) -> tuple[str, ...] | None:
        allowed = f"a string or up to {limit} strings of 1 to {MAX_STOP_CHARS} characters"
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or len(items) > limit:
            raise InvalidParameter.of(name, value, allowed)
        for item in items:
            if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
                raise InvalidParameter.of(name, item, allowed)
        return tuple(items) or None

    return check


def _token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > MAX_BIAS * 16:
        raise InvalidParameter.of(name, value, "a list of token ids")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise InvalidParameter.of(name, item, "token ids: integers from 0")
    return tuple(dict.fromkeys(value)) or None


def _bias(name: str, value: Any) -> dict[int, float] | None:
    allowed = f"up to {MAX_BIAS} pairs of token id and a number from -100 to 100"
    if not isinstance(value, Mapping) or len(value) > MAX_BIAS:
        raise InvalidParameter.of(name, value, allowed)
    for key, bias in value.items():
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise InvalidParameter.of(name, key, allowed)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidParameter.of(name, bias, allowed)
    return {int(k): float(v) for k, v in value.items()} or None


def _mode(name: str, value: Any) -> str:
    if value not in LOGPROBS_MODES:
        raise InvalidParameter.of(name, value, " or ".join(LOGPROBS_MODES))
    return str(value)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise InvalidParameter.of(name, value, "a mapping from plugin name to its options")
    return dict(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(0),
    "min_tokens": _integer(0),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _integer(-1, advice="Use 0 or -1 to switch it off."),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 10),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _integer(-(2**63), 2**64 - 1),
    "n": _integer(1, MAX_N),
    "stop": _strings(MAX_STOPS),
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "bad_words": _strings(MAX_BAD_WORDS),
    "allowed_token_ids": _token_ids,
    "logit_bias": _bias,
    "ignore_eos": _flag,
    "logprobs": _integer(0, LOGPROBS_CEILING),
    "prompt_logprobs": _integer(0, LOGPROBS_CEILING),
    "logprobs_mode": _mode,
    "truncate_prompt_tokens": _truncation,
    "extra": _mapping,
}

_FALLBACK: dict[str, Any] = {
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs_mode": "raw",
}

_NEUTRAL: dict[str, Any] = {f.name: {} if f.name == "extra" else f.default for f in fields(SamplingParams)}
