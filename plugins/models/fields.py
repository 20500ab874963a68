"""Read typed values from a config mapping, with errors that name file, key and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slotline.errors import CheckpointError

_REQUIRED: Any = object()


class Fields:
    """Typed access to ``values``, which were read from ``where``.

    Args:
        values: the mapping, such as a parsed config.json or GGUF metadata.
        where: the file's name, for messages.
        prefix: put before every key, such as ``"llama."`` for GGUF metadata.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value; null counts as absent."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = _REQUIRED, *, low: int = 1) -> Any:
        """Return an integer of at least ``low``.

        Raises:
            CheckpointError: the key is missing without a default, or its value is something else.
        """
        value = self.get(key, default)
        if value is default and default is not _REQUIRED:
            return default
        if type(value) is not int or value < low:
            self._refuse(key, value, f"an integer, at least {low}")
        return value

    def number(self, key: str, default: float | None = _REQUIRED, *, low: float = 0.0) -> Any:
        """Return a finite number of at least ``low``.

        Raises:
            CheckpointError: the key is missing without a default, or its value is something else.
        """
        value = self.get(key, default)
        if value is default and default is not _REQUIRED:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value < low:
            self._refuse(key, value, f"a number, at least {low:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean.

        Raises:
            CheckpointError: the value is something else.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        """Return a string.

        Raises:
            CheckpointError: the value is something else.
        """
        value = self.get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a string")
        return str(value)

    def ids(self, key: str) -> frozenset[int]:
        """Return token ids given as one integer, a list of them, or null.

        Raises:
            CheckpointError: the value is something else.
        """
        value = self.get(key, [])
        listed = value if isinstance(value, list) else [value]
        if any(type(item) is not int or item < 0 for item in listed):
            self._refuse(key, value, "a token id or a list of them")
        return frozenset(listed)

    def _refuse(self, key: str, value: object, allowed: str) -> None:
        name = self.prefix + key
        if value is _REQUIRED:
            raise CheckpointError(
                f"{self.where} has no {name!r}; it needs {allowed}. The file is damaged or incomplete"
            )
        raise CheckpointError(f"{self.where}: {name} is {value!r:.80}; allowed: {allowed}")
