"""Progress of downloads and checks: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

# Called with the bytes done since the last call.
Advance = Callable[[int], None]


class Progress(Protocol):
    """Shows how far a long step is."""

    def step(self, label: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Enter a step of ``total`` bytes (None = unknown); the value is called with bytes done."""

    @property
    def visible(self) -> bool:
        """Return whether anybody watches."""


class Quiet:
    """Shows nothing."""

    visible = False

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Advance]:
        """Enter a step that is not shown."""
        yield lambda count: None


class Bars:
    """Shows rich progress bars on stderr."""

    visible = True

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Advance]:
        """Enter a step with a bar of its own, or a running counter where the total is unknown."""
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda count: bars.advance(task, count)


def for_terminal() -> Progress:
    """Return bars where stderr is a terminal, else nothing."""
    return Bars() if sys.stderr is not None and sys.stderr.isatty() else Quiet()
