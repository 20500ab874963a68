"""Requests that are being answered, by the ids that their clients know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Running:
    """Find a request by its answer's id, or by the id that its client gave it.

    An answer's id cannot be guessed, so whoever names it may abort it. A client makes up its own ids as it
    likes, so two may use the same: such an id is known only to the client that gave it.
    """

    def __init__(self) -> None:
        self._aborts: dict[object, list[Callable[[], None]]] = defaultdict(list)

    @contextmanager
    def known(self, answer_id: str, request_id: str, client: str | None, abort: Callable[[], None]) -> Iterator[None]:
        """Let a request be found while it is answered."""
        keys = {answer_id, (client, request_id)}
        for key in keys:
            self._aborts[key].append(abort)
        try:
            yield
        finally:
            for key in keys:
                self._aborts[key].remove(abort)
                if not self._aborts[key]:
                    del self._aborts[key]

    def abort(self, name: str, client: str | None) -> int:
        """Abort the requests of that id; return how many there were."""
        found = [abort for key in (name, (client, name)) for abort in self._aborts.get(key, ())]
        distinct = list(dict.fromkeys(found))  # a request without an id of its own is there twice
        for abort in distinct:
            abort()
        return len(distinct)
