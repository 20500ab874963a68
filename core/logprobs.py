"""Logprobs as a user reads them: a list of dicts, backed by columns until somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from slotline.plan import LogprobColumns

if TYPE_CHECKING:
    from slotline.text import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


Part = tuple[LogprobColumns, int, int]  # columns, start, stop


class Logprobs(Sequence["dict[int, float] | None"]):
    """Log-probabilities of consecutive tokens; ``lp[i]`` is ``{token_id: value}``, the token itself first.

    A position without values (the first of a prompt) reads as None. Ranks, spelling and bytes of
    the candidates come from ``entries(i)``.
    """

    __slots__ = ("_parts", "_vocabulary")

    def __init__(self, columns: LogprobColumns, vocabulary: Vocabulary) -> None:
        self._parts: list[Part] = [(columns, 0, len(columns))]
        self._vocabulary = vocabulary

    @classmethod
    def of(cls, parts: list[Part], vocabulary: Vocabulary) -> Logprobs:
        """Return the positions ``start .. stop`` of each (columns, start, stop), one after the other."""
        made = cls.__new__(cls)
        made._parts, made._vocabulary = parts, vocabulary
        return made

    @property
    def columns(self) -> LogprobColumns:
        """Return all of it as one table."""
        if len(self._parts) != 1 or self._parts[0][1:] != (0, len(self._parts[0][0])):
            whole = LogprobColumns.concat([columns.slice(start, stop) for columns, start, stop in self._parts])
            self._parts = [(whole, 0, len(whole))]
        return self._parts[0][0]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._parts)

    @overload
    def __getitem__(self, index: int) -> dict[int, float] | None: ...
    @overload
    def __getitem__(self, index: slice) -> Logprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, float] | Logprobs | None:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"slice step is {step}; allowed: 1")
            return Logprobs(self.columns.slice(start, max(start, stop)), self._vocabulary)
        low, high = self._range(index)
        if low == high:
            return None
        c = self.columns
        return dict(zip(c.ids[low:high].tolist(), c.values[low:high].tolist(), strict=True))

    def __iter__(self) -> Iterator[dict[int, float] | None]:
        found: list[dict[int, float] | None] = []
        for columns, start, stop in self._parts:
            if stop - start != 1:
                return self._rows()  # one at a time: a whole answer may be large
            found.append(_row(columns, start))  # as in pieces of a stream
        return iter(found)

    def _rows(self) -> Iterator[dict[int, float] | None]:
        for columns, start, stop in self._parts:
            for at in range(start, stop):
                yield _row(columns, at)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a mutable-looking sequence, compared by value

    def __repr__(self) -> str:
        return repr(list(self))

    def entries(self, index: int) -> list[TokenLogprob]:
        """Return the candidates at one position with rank, spelling and true bytes."""
        low, high = self._range(index)
        c, v = self.columns, self._vocabulary
        return [
            TokenLogprob(i, value, rank, v.spell(i), v.bytes_of(i))
            for i, value, rank in zip(
                c.ids[low:high].tolist(), c.values[low:high].tolist(), c.ranks[low:high].tolist(), strict=True
            )
        ]

    def _range(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)}")
        index %= len(self)
        return int(self.columns.indptr[index]), int(self.columns.indptr[index + 1])


def _row(columns: LogprobColumns, at: int) -> dict[int, float] | None:
    """Return what is told of one position, made for its reader alone."""
    bounds, ids, values = columns.lists
    low, high = bounds[at], bounds[at + 1]
    # Both slices have one length; asking zip to make sure would take as long as half of the rest.
    return dict(zip(ids[low:high], values[low:high])) if high > low else None  # noqa: B905
