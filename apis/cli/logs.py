"""Where a server's log goes: stderr, as text or as JSON lines, and never at the cost of an answer.

A log is written by a thread of its own. Where its target takes no more (a full disk, a pipe that
nobody reads), lines are dropped and counted; the event loop never waits for it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from datetime import UTC, datetime
from typing import Any

from slotline.apis.openai.errors import to_json

KEPT = 10_000  # lines that may wait


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return to_json(line).decode()


class TextFormatter(logging.Formatter):
    """One line for people, with the fields of a structured one after it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, "fields", None)
        if fields is None:
            return super().format(record)
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        return f"{record.levelname} {shown}"


class ThreadedHandler(logging.Handler):
    """Write lines to a file on a thread; drop them where it does not keep up.

    Attributes:
        dropped: lines that were not written.
    """

    def __init__(self, fd: int, kept: int = KEPT) -> None:
        super().__init__()
        self.dropped = 0
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(kept)
        self._thread = threading.Thread(target=self._write, name="slotline-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave a line for the thread."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self.dropped += 1
        except Exception:
            self.dropped += 1  # a line that cannot be formatted; saying so would come back here

    def close(self) -> None:
        """Write what waits, for a moment."""
        try:
            self._lines.put(None, timeout=1)
            self._thread.join(timeout=1)
        except queue.Full:
            pass
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            data = line.encode("utf-8", "backslashreplace")
            try:
                while data:  # not through a stream, which would keep what it could not write
                    data = data[os.write(self._fd, data) :]
            except OSError:
                self.dropped += 1


def set_up_logs(*, json: bool, access: bool, fd: int = 2) -> ThreadedHandler:
    """Send the process's log to a file (stderr): warnings and errors, and a line a request if ``access``."""
    handler = ThreadedHandler(fd)
    handler.setFormatter(JsonFormatter() if json else TextFormatter("%(levelname)s %(message)s"))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("slotline.access").setLevel(logging.INFO if access else logging.WARNING)
    return handler
