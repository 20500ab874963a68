"""Parameters and options: what is accepted, what is refused and in which words."""

from __future__ import annotations

import math
import pickle

import pytest

from slotline import EngineConfig, SamplingParams
from slotline import errors as errors_module
from slotline.config import option_help, option_types
from slotline.errors import ConfigError, InvalidParameter, QueueFull, SlotlineError
from slotline.intake import choice_seed

REFUSED = {
    "max_tokens": [-1, 1.5, "10", True],
    "min_tokens": [-1, 0.5],
    "temperature": [-1, 2.5, "x", math.nan, math.inf, True, 10**400],
    "top_p": [0, -0.5, 2, "1"],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, 0.009, -1, 11],
    "presence_penalty": [3, -2.5],
    "frequency_penalty": [100],
    "seed": [2**70, -(2**64), 1.5, "x", True],
    "n": [0, -1, 129, 1.0],
    "stop": ["", [""], [5], {}, ["a"] * 65, "x" * 1025],
    "stop_token_ids": [[-1], [True], ["1"], "ab", 5],
    "bad_words": [[""], [1]],
    "allowed_token_ids": [[-5]],
    "logit_bias": [{"AI": 1}, {-1: 1}, {5: 1000}, {5: math.nan}, {5: "x"}, [1]],
    "ignore_eos": [1, "yes"],
    "include_stop_str_in_output": [0],
    "skip_special_tokens": ["no"],
    "logprobs": [-1, 1025, True, 1.0],
    "prompt_logprobs": [-1, 2000],
    "logprobs_mode": ["none", 1],
    "truncate_prompt_tokens": [0, -2, True, 1.5, "5"],
    "extra": [5, {1: 2}],
}

ACCEPTED = {
    "max_tokens": [0, 1, 10**12],
    "temperature": [0, 2, 0.5],
    "top_p": [1, 0.01],
    "top_k": [-1, 0, 1, 10**9, 10**400],
    "min_p": [0, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [0, 1, 2**31, 2**63 - 1, 2**64 - 1, -1],
    "n": [1, 128],
    "stop": ["a", ["a", "b"], []],
    "logprobs": [0, 20, 1024],
    "logit_bias": [{5: 100}, {5: -100.0}, {}],
    "truncate_prompt_tokens": [-1, 1, 10**9],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in REFUSED.items() for v in values])
def test_a_bad_value_is_refused_by_name_with_value_and_range(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is ") and "; allowed: " in caught.value.message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ACCEPTED.items() for v in values])
def test_a_boundary_value_is_accepted(name: str, value: object) -> None:
    SamplingParams(**{name: value})


def test_every_field_has_a_refusal() -> None:
    assert REFUSED.keys() == set(SamplingParams.__dataclass_fields__) - {"constraint"}


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidParameter, match="max_tokens \\(4\\)"):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(temperature="x" * 1000)
    assert len(caught.value.message) < 200


def test_what_is_given_wins_over_the_model_and_the_model_over_neutral() -> None:
    resolved = SamplingParams(top_p=0.5).resolved({"top_p": 0.9, "top_k": 7})
    assert (resolved.top_p, resolved.top_k, resolved.temperature) == (0.5, 7, 1.0)
    assert SamplingParams(temperature=0.5, stop="a", n=2).given() == {"temperature", "stop", "n"}
    assert SamplingParams().given() == frozenset()
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=0.1).greedy


def test_choice_seeds_differ_and_the_first_is_the_seed() -> None:
    seeds = {choice_seed(seed, choice) for seed in range(50) for choice in range(50)}
    assert len(seeds) == 2500 - 0 and choice_seed(7, 0) == 7
    assert all(0 <= s < 2**64 for s in seeds)


# --- errors ---------------------------------------------------------------------------


def all_errors() -> list[type[SlotlineError]]:
    found, todo = [], [SlotlineError]
    while todo:
        error = todo.pop()
        found.append(error)
        todo += error.__subclasses__()
    return [e for e in found if e.__module__ == errors_module.__name__]


def test_every_error_has_a_code_of_its_own_and_is_in_the_tree() -> None:
    codes = [e.code for e in all_errors()]
    assert len(codes) == len(set(codes))
    for error in all_errors():
        assert error.__name__ in (errors_module.__doc__ or ""), f"{error.__name__} is not in the docstring's tree"


@pytest.mark.parametrize("error", all_errors(), ids=lambda e: e.__name__)
def test_errors_survive_pickling(error: type[SlotlineError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error and copy.message == "what happened"


def test_pickling_keeps_what_an_error_carries() -> None:
    refused = pickle.loads(pickle.dumps(InvalidParameter.of("top_p", 3, "0 to 1")))
    assert (refused.param, refused.message) == ("top_p", "top_p is 3; allowed: 0 to 1")
    assert pickle.loads(pickle.dumps(QueueFull("full", retry_after=7))).retry_after == 7


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_slots": 0}, "max_slots is 0; allowed: an integer from 1 to 4096"),
        ({"max_slots": True}, "max_slots is True"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"kv_cache_fraction": 1.5}, "kv_cache_fraction is 1.5"),
        ({"kv_cache_tokens": 5, "kv_cache_fraction": 0.5}, "both given"),
        ({"max_slotz": 5}, "did you mean 'max_slots'"),
        ({"deterministic": 1}, "deterministic is 1; allowed: true or false"),
        ({"pipeline_depth": 3}, "allowed: 1 or 2"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", "\\(")):
        EngineConfig.of("m", **options)


def test_options_come_from_file_environment_and_call_in_that_order(tmp_path) -> None:
    file = tmp_path / "slotline.toml"
    file.write_text('[engine]\nmodel = "from-file"\nmax_slots = 3\nmax_queue = 5\n')
    environ = {"SLOTLINE_MAX_QUEUE": "7", "SLOTLINE_PREFIX_CACHING": "off", "SLOTLINE_KV_CACHE_FRACTION": "0.5"}
    config = EngineConfig.from_sources({"max_slots": 9, "dtype": None}, file=file, environ=environ)
    assert (config.model, config.max_slots, config.max_queue) == ("from-file", 9, 7)
    assert config.prefix_caching is False and config.kv_cache_fraction == 0.5


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"SLOTLINE_MAX_SLOTS": "many"}, "SLOTLINE_MAX_SLOTS is 'many'"),
        ({"SLOTLINE_DETERMINISTIC": "2"}, "true or false"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.from_sources({}, environ=environ)


def test_a_bad_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        EngineConfig.from_sources({}, file=tmp_path / "none.toml", environ={})
    broken = tmp_path / "broken.toml"
    broken.write_text("max_slots = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        EngineConfig.from_sources({}, file=broken, environ={})
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("max_slot = 3")
    with pytest.raises(ConfigError, match="did you mean 'max_slots'"):
        EngineConfig.from_sources({}, file=unknown, environ={})


def test_every_option_has_help_and_a_plain_type() -> None:
    assert all(option_help().values()) and option_help().keys() == option_types().keys()
    assert set(option_types().values()) == {str, int, float, bool}
