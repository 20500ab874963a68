"""What the backend keeps of each row: its tokens, its pages, and what its sampling asks for. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from slotline.plan import NO_LOGPROBS, LongArray, RowSetup

_FIRST_PAGES = 8


class Row:
    """One occupant of a slot, from its admission to its end.

    Attributes:
        setup: as the scheduler sent it.
        dead: it sampled a stop id, or had no finite logits: nothing of it is computed any more.
        refused: a logits processor refused its options.
        length: tokens known, prompt and output.
        special: its logits are changed before the temperature (masks, bias, penalties, processors).
        adjusts: so they are for something else than a minimum length.
    """

    def __init__(self, setup: RowSetup, vocab_size: int, block_size: int) -> None:
        self.setup = setup
        self.dead = False
        self.refused = False
        self.length = len(setup.token_ids)
        self._tokens = np.empty(max(setup.max_len, self.length) + 1, np.int64)
        self._tokens[: self.length] = setup.token_ids
        self._slots = np.empty(_FIRST_PAGES * block_size, np.int64)
        self._pages = 0
        self._in_page = np.arange(block_size, dtype=np.int64)
        self._read_params(vocab_size)

    def _read_params(self, vocab_size: int) -> None:
        setup, params = self.setup, self.setup.params
        self.greedy = params.greedy
        self.truncates = bool((params.top_k or 0) > 0 or (params.top_p or 1.0) < 1.0 or (params.min_p or 0.0) > 0.0)
        self.raw_logprobs = setup.logprobs != NO_LOGPROBS and params.logprobs_mode != "processed"
        self.processed_logprobs = setup.logprobs != NO_LOGPROBS and params.logprobs_mode == "processed"
        # Ids past the logits cannot be sampled, so masks and biases on them have nothing to act on.
        self.stop_ids = _ids(setup.stop_ids, vocab_size)
        self.stop_set = frozenset(setup.stop_ids)
        self.banned = _ids((w[0] for w in setup.bad_words if len(w) == 1), vocab_size)
        self.phrases = tuple(w for w in setup.bad_words if len(w) > 1 and w[-1] < vocab_size)
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, vocab_size)
        bias = {i: b for i, b in (params.logit_bias or {}).items() if i < vocab_size}
        self.bias_ids = np.fromiter(bias, np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.seen = SeenTokens(setup) if penalised(setup) else None
        self.processors = tuple(params.extra)
        self.adjusts = _adjusts(setup)
        self.special = changes_logits(setup)

    @property
    def tokens(self) -> LongArray:
        """Return [length] all tokens known, prompt and output (a view)."""
        return self._tokens[: self.length]

    @property
    def last_token(self) -> int:
        """Return the token sampled last."""
        return int(self._tokens[self.length - 1])

    @property
    def slots(self) -> LongArray:
        """Return the place of each position in the KV pool, as far as blocks were given (a view)."""
        return self._slots[: self._pages * len(self._in_page)]

    def add_blocks(self, blocks: npt.NDArray[np.int32]) -> None:
        """Append blocks to the row's table."""
        size = len(self._in_page)
        filled = self._pages * size
        self._pages += len(blocks)
        if self._pages * size > len(self._slots):
            grown = np.empty(2 * self._pages * size, np.int64)
            grown[:filled] = self._slots[:filled]
            self._slots = grown
        places = blocks.astype(np.int64)[:, None] * size + self._in_page  # [blocks, size]
        self._slots[filled : self._pages * size] = places.reshape(-1)

    def append(self, token: int, position: int) -> None:
        """Take note of the token sampled for a position."""
        if position >= len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), np.int64)])
        self._tokens[position] = token
        self.length = position + 1
        if self.seen is not None:
            self.seen.add(token)

    def forbidden(self, position: int) -> LongArray:
        """Return the ids that bad words and the minimum length rule out at a position."""
        parts = [self.banned]
        if position < self.setup.min_len:
            parts.append(self.stop_ids)
        known = self.tokens
        ends = [p[-1] for p in self.phrases if _ends_with(known, p[:-1])]
        if ends:
            parts.append(np.array(ends, np.int64))
        return np.concatenate(parts)


class SeenTokens:
    """The distinct tokens of a row and how often each was output, kept only where penalties ask.

    Sparse, since a row has seen hundreds of ids where the vocabulary has a hundred thousand.
    """

    def __init__(self, setup: RowSetup) -> None:
        params = setup.params
        self.repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.frequency = params.frequency_penalty or 0.0
        self.presence = params.presence_penalty or 0.0
        prompt = np.unique(setup.token_ids[: setup.prompt_len])
        self._place = {int(token): i for i, token in enumerate(prompt)}
        self._ids = prompt.astype(np.int64)
        self._counts = np.zeros(len(prompt), np.float32)
        self._size = len(prompt)
        for token in setup.token_ids[setup.prompt_len :]:
            self.add(int(token))

    @property
    def ids(self) -> LongArray:
        """Return [N] the distinct ids of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Return [N] how often each was output; 0 for those of the prompt alone."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one output token."""
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(self._size + 8, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(self._size + 8, np.float32)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


def changes_logits(setup: RowSetup) -> bool:
    """Tell whether the logits of a request are changed before the temperature."""
    return setup.min_len > setup.prompt_len or _adjusts(setup)


def _adjusts(setup: RowSetup) -> bool:
    return has_lists(setup) or penalised(setup)


def has_lists(setup: RowSetup) -> bool:
    """Tell whether a request names tokens to allow, ban or favour, or plugins that may do anything."""
    params = setup.params
    return bool(setup.bad_words or params.allowed_token_ids is not None or params.logit_bias or params.extra)


def penalised(setup: RowSetup) -> bool:
    """Tell whether a request has a penalty that does something."""
    p = setup.params
    return (p.repetition_penalty or 1.0) != 1.0 or bool(p.frequency_penalty) or bool(p.presence_penalty)


def _ids(tokens: Iterable[int], vocab_size: int) -> LongArray:
    return np.array(sorted({t for t in tokens if 0 <= t < vocab_size}), np.int64)


def _ends_with(tokens: LongArray, tail: Sequence[int]) -> bool:
    return len(tokens) >= len(tail) and tokens[len(tokens) - len(tail) :].tolist() == list(tail)
