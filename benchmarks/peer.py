"""An engine in another process, which answers lines of JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType

from slotline import EngineConfig
from slotline.manager import PluginManager

HERE = Path(__file__).parent


class Peer:
    """A process that says its version in a first line, then answers requests; a context manager."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version: str = self._read()["version"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> tuple[float, list[list[int]]]:
        """Return seconds and answers of prompts that are given at once."""
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        return reply["seconds"], reply["answers"]

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"this process ended, see what it wrote above: {' '.join(self._command)}")
        return json.loads(line)


def default_file() -> Path:
    """Return the default model's GGUF file, which opening an engine has fetched."""
    name = EngineConfig().model
    sources = PluginManager("").registry("model_sources").values()
    folder = next(Path(cached.path) for source in sources for cached in source.list_cached() if cached.name == name)
    (file,) = folder.rglob("*.gguf")
    return file
