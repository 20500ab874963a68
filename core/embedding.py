"""Texts as vectors: what the model makes of a prompt, at its last token."""

from __future__ import annotations

import numpy as np

from slotline.params import SamplingParams
from slotline.plan import FloatArray
from slotline.request import Completion

EMBED_ONLY = SamplingParams(max_tokens=0, temperature=0)


def embedding_of(completion: Completion) -> FloatArray:
    """Return the embedding of a prompt that was submitted with ``embed``, scaled to length 1."""
    vector = completion.embedding
    assert vector is not None, "a backend that says it embeds has left out the embedding of a prompt"
    length = float(np.linalg.norm(vector))
    return (vector / length).astype(np.float32) if length > 0 else vector
