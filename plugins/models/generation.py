"""A model's own sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotline.errors import CheckpointError, InvalidParameter
from slotline.params import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sampling values that ``values`` gives, by SamplingParams name; nulls count as absent.

    ``do_sample`` is not one of them: files say ``do_sample: false`` out of habit while the model is used with
    sampling, so only values that are given count (vLLM reads the file the same way). A request is greedy with
    temperature 0.

    Raises:
        CheckpointError: a value is one that no request could use.
    """
    found = {name: values[name] for name in _NAMES if values.get(name) is not None}
    try:
        checked = SamplingParams(**found)
    except InvalidParameter as error:
        raise CheckpointError(f"{where}: {error.message}. Correct or remove it") from error
    return {name: getattr(checked, name) for name in found}
