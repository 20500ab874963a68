"""How likely a text is under the model, from the logprobs of its own tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slotline.params import SamplingParams
from slotline.request import Completion

SCORE_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0)


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is under the model.

    Attributes:
        token_ids: of the text.
        logprobs: natural log-probability of each token given those before; None for the first.
        total: their sum.
        perplexity: exp(-total / number of scored tokens).
    """

    token_ids: list[int]
    logprobs: list[float | None]
    total: float
    perplexity: float


def score_of(completion: Completion) -> Score:
    """Return the score of a completion that was asked for with ``SCORE_ONLY``."""
    values: list[float | None] = []
    for token_id, row in zip(completion.prompt_token_ids, completion.prompt_logprobs or (), strict=True):
        values.append(None if row is None else row[token_id])
    scored = [v for v in values if v is not None]
    total = math.fsum(scored)
    perplexity = math.exp(-total / len(scored)) if scored else math.nan
    return Score(completion.prompt_token_ids, values, total, perplexity)
