"""Logits processors of plugins: which row uses which, and calling them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from slotline.backend import BackendInfo

if TYPE_CHECKING:
    from slotline.plugins.processors import LogitsProcessor, ProcessorFactory
    from slotline.plugins.torch_backend.rows import Row

log = logging.getLogger("slotline.torch")


class Processors:
    """The processors of one backend, each made when a row first asks for it.

    Args:
        factories: by the name that `SamplingParams.extra` selects them with.
    """

    def __init__(self, factories: Mapping[str, ProcessorFactory], info: BackendInfo) -> None:
        self._factories = factories
        self._info = info
        self._ops: dict[str, LogitsProcessor] = {}
        self._users: dict[str, set[int]] = {}  # slots

    def add(self, row: Row) -> bool:
        """Tell the processors that a row begins; return false if one refuses its options."""
        slot = row.setup.row
        for name in row.processors:
            if name not in self._factories:
                continue  # of another kind of plugin; an unknown name was refused at intake
            try:
                if name not in self._ops:
                    self._ops[name] = self._factories[name](self._info)
                self._ops[name].add(slot, row.setup.params.extra[name])
                self._observe(name, slot, row.tokens.tolist())
            except Exception:
                # One request's options must not end the step of all the others.
                log.exception("logits processor %s refused the options of one request, which fails", name)
                self.remove(row)
                return False
            self._users.setdefault(name, set()).add(slot)
        return True

    def remove(self, row: Row) -> None:
        """Tell the processors that a row is gone."""
        for name in row.processors:
            users = self._users.get(name, set())
            if row.setup.row in users:
                users.discard(row.setup.row)
                self._ops[name].remove(row.setup.row)

    def observe(self, row: Row, token: int) -> None:
        """Tell those who want to know which token was sampled."""
        for name in row.processors:
            if row.setup.row in self._users.get(name, ()):
                self._observe(name, row.setup.row, [token])

    def apply(self, logits: Tensor, rows: Sequence[tuple[int, Row]]) -> None:
        """Let each processor change the logits [R, V] of the rows, given with their lines, that selected it."""
        for name, users in self._users.items():
            chosen = [(i, row.setup.row) for i, row in rows if row.setup.row in users]
            if not chosen:
                continue
            lines, slots = [i for i, _ in chosen], np.array([slot for _, slot in chosen], np.int32)
            if lines == list(range(len(logits))):
                self._ops[name].apply(logits, slots)
            else:
                part = logits[lines]
                self._ops[name].apply(part, slots)
                logits[lines] = part

    def _observe(self, name: str, slot: int, tokens: Sequence[int]) -> None:
        observe = getattr(self._ops[name], "observe", None)
        if observe is not None:
            observe(slot, tokens)
