"""Options made from EngineConfig and SamplingParams, so that names, defaults and help exist once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import click

from slotline.config import EngineConfig, option_help, option_types
from slotline.params import SamplingParams

Command = Callable[..., Any]

_SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("temperature", float, "0 is greedy; up to 2."),
    ("top_p", float, "Sample from the smallest set of tokens with this much probability."),
    ("top_k", int, "Sample from the k likeliest tokens; 0 is all."),
    ("min_p", float, "Leave out tokens below this share of the likeliest one's probability."),
    ("repetition_penalty", float, "Above 1, tokens that were seen become less likely."),
    ("presence_penalty", float, "Subtracted once from the logits of tokens in the answer."),
    ("frequency_penalty", float, "Subtracted for each time a token is in the answer."),
    ("seed", int, "Seed of the sampling; the same seed gives the same answer."),
)


def engine_options(*, without: Collection[str] = (), model_is_option: bool = False) -> Callable[[Command], Command]:
    """Add MODEL, --config and an option for each field of EngineConfig; pass on ``config``.

    What is not given stays with the file, then the environment (SLOTLINE_NAME), then the default.

    Args:
        without: fields to leave out.
        model_is_option: make it --model, for a command whose arguments are something else.
    """
    names = [f.name for f in fields(EngineConfig) if f.name != "model" and f.name not in without]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(model: str | None, config_file: str | None, **options: Any) -> Any:
            given = {name: options.pop(name) for name in names}
            config = EngineConfig.from_sources({"model": model, **given}, file=config_file)
            return command(config=config, **options)

        decorated: Command = run
        for name in reversed(names):
            decorated = _engine_option(name)(decorated)
        file = click.Path(exists=True, dir_okay=False)
        decorated = click.option("--config", "config_file", type=file, help="TOML file with engine options.")(decorated)
        if model_is_option:
            return _engine_option("model")(decorated)
        return click.argument("model", required=False)(decorated)

    return decorate


def _engine_option(name: str) -> Callable[[Command], Command]:
    kind, default, flag = option_types()[name], EngineConfig.__dataclass_fields__[name].default, name.replace("_", "-")
    text = option_help()[name]
    text = text[0].upper() + text[1:] + "."
    if kind is bool:
        shown = "on" if default else "off"
        return click.option(f"--{flag}/--no-{flag}", name, default=None, help=f"{text} [default: {shown}]")
    if default is not None:
        text += f" [default: {default}]"
    return click.option(f"--{flag}", name, type=kind, default=None, help=text)


def sampling_options(*, max_tokens: int) -> Callable[[Command], Command]:
    """Add options for how an answer is sampled; pass on ``sampling``, a dict for SamplingParams."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**options: Any) -> Any:
            sampling = {name: options.pop(name) for name, *_ in _SAMPLING}
            sampling |= {"max_tokens": options.pop("max_tokens"), "stop": options.pop("stop") or None}
            sampling["ignore_eos"] = options.pop("ignore_eos") or None
            given = {name: value for name, value in sampling.items() if value is not None}
            SamplingParams(**given)  # refuse a bad value before a model is loaded
            return command(sampling=given, **options)

        decorated: Command = run
        decorated = click.option("--ignore-eos", is_flag=True, help="Go on past the end of the answer.")(decorated)
        stop = click.option(
            "--stop", multiple=True, help="End the answer before this text; may be given several times."
        )
        decorated = stop(decorated)
        for name, kind, text in reversed(_SAMPLING):
            flag = "--" + name.replace("_", "-")
            decorated = click.option(flag, name, type=kind, default=None, help=text)(decorated)
        longest = click.option(
            "--max-tokens", type=int, default=max_tokens, show_default=True, help="Longest answer, in tokens."
        )
        return longest(decorated)

    return decorate
