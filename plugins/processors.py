"""Logits processors: what a plugin provides, and the built-in ones.

A processor changes the logits of the rows that select it with ``SamplingParams.extra[name]``, after
the penalties and before the temperature. Register a factory, usually the class itself::

    @hookimpl
    def slotline_register_logits_processors(register):
        register("no_repeat_ngram", NoRepeatNgram)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slotline.backend import BackendInfo
from slotline.errors import InvalidParameter
from slotline.hookspecs import hookimpl
from slotline.plan import IntArray

if TYPE_CHECKING:
    import torch


class LogitsProcessor(Protocol):
    """Change logits in place. Called on the backend's thread only.

    A processor that needs the tokens of a row also has ``observe(row, token_ids)``: it is called
    with all tokens known after ``add``, and then with each token sampled.

    Attributes:
        graph_safe: ``apply`` does the same work whatever the rows' options are, so that it may be
            captured in a CUDA graph.
    """

    graph_safe: bool

    def add(self, row: int, args: Any) -> None:
        """Begin with a row whose request gave these options."""

    def remove(self, row: int) -> None:
        """Forget a row."""

    def apply(self, logits: torch.Tensor, rows: IntArray) -> None:
        """Change logits [R, V] float32 of these rows; -inf rules a token out."""


ProcessorFactory = Callable[[BackendInfo], LogitsProcessor]


@hookimpl
def slotline_register_logits_processors(register: Callable[[str, ProcessorFactory], None]) -> None:
    """Register ``no_repeat_ngram``."""
    register("no_repeat_ngram", NoRepeatNgram)


class NoRepeatNgram:
    """Never produce the same n-gram twice: ``extra={"no_repeat_ngram": {"size": 3}}``.

    The prompt counts, as it does for repetition_penalty.
    """

    graph_safe = False

    def __init__(self, info: BackendInfo) -> None:
        self._vocab_size = info.vocab_size
        self._rows: dict[int, _Ngrams] = {}

    @staticmethod
    def check(args: Any) -> int:
        """Return the size that the options ask for.

        Raises:
            InvalidParameter: they are not ``{"size": 1 or more}``.
        """
        size = args.get("size") if isinstance(args, Mapping) and set(args) == {"size"} else None
        if type(size) is not int or size < 1:
            raise InvalidParameter.of("extra.no_repeat_ngram", args, '{"size": an integer, at least 1}')
        return size

    def add(self, row: int, args: Any) -> None:
        """Begin with a row."""
        self._rows[row] = _Ngrams(self.check(args))

    def remove(self, row: int) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Take note of tokens of a row, in order."""
        for token in token_ids:
            self._rows[row].append(token)

    def apply(self, logits: torch.Tensor, rows: IntArray) -> None:
        """Rule out the tokens that would complete an n-gram for the second time."""
        for line, row in enumerate(rows.tolist()):
            banned = [t for t in self._rows[row].continuations() if t < self._vocab_size]
            if banned:
                logits[line, banned] = float("-inf")


class _Ngrams:
    """The n-grams of one row: which tokens have followed each n - 1 tokens."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tail: tuple[int, ...] = ()
        self._next: dict[tuple[int, ...], set[int]] = {}

    def append(self, token: int) -> None:
        keep = self._size - 1
        if len(self._tail) == keep:
            self._next.setdefault(self._tail, set()).add(token)
        self._tail = (*self._tail, token)[-keep:] if keep else ()

    def continuations(self) -> set[int]:
        return self._next.get(self._tail, set()) if len(self._tail) == self._size - 1 else set()
