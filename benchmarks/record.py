"""Keep what a benchmark measured: rows, command, commit and machine, in a file named by UTC time and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "triton", "numpy")


def keep(rows: Sequence[dict], name: str, folder: Path = RESULTS) -> Path:
    """Write rows to ``<UTC>-<commit>-<name>.json`` and say where."""
    commit = _git("rev-parse", "--short", "HEAD") or "unknown"
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    record = {
        "command": " ".join(["python", _program(), *map(_without_place, sys.argv[1:])]),
        "utc": now,
        "commit": commit,
        "modified_files": [line[3:] for line in _git("status", "--porcelain").splitlines()],
        "machine": machine(),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now}-{commit}-{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {os.path.relpath(path)}")
    return path


def machine() -> dict[str, object]:
    """Return what the figures depend on: processor, cores, how busy they are, and the GPU."""
    found: dict[str, object] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "load_average": os.getloadavg()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["vectors"] = torch.backends.cpu.get_cpu_capability()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _program() -> str:
    """Return the script that runs, as seen from the checkout, or the module."""
    script = Path(sys.argv[0])
    return f"-m {script.parent.name}" if script.name == "__main__.py" else os.path.relpath(script, REPO)


def _without_place(argument: str) -> str:
    """Return an argument as it is worth keeping: of an absolute path, the name."""
    return Path(argument).name if argument.startswith("/") else argument


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.rstrip("\n")
