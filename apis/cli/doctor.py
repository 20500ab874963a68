"""``slotline doctor``: what is here, what works, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

import slotline
from slotline.backend import BackendEntry
from slotline.errors import SlotlineError
from slotline.manager import PluginManager

PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "gguf", "huggingface_hub", "starlette", "uvicorn", "pluggy")

_PROBE = """
import torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(", ".join(names) or "none that torch can use")
"""


@click.command()
def doctor() -> None:
    """Check versions, plugins, devices and the cache; the last line says what to do."""
    advice: list[str] = []
    for line in _lines(advice):
        click.echo(line)
    click.echo(advice[0] if advice else "All is well: try `slotline chat`.")
    if advice:
        sys.exit(1)


def _lines(advice: list[str]) -> Iterator[str]:
    yield f"slotline  {slotline.__version__}, Python {platform.python_version()}, {platform.system()}"
    for package in PACKAGES:
        yield f"{package}  {_version(package)}"
    yield f"GPUs  {_gpus()}"
    try:
        manager = PluginManager()
        yield f"plugins  {', '.join(info.name for info in manager.plugins()) or 'none'}"
        yield from _backends(manager, advice)
        yield from _caches(manager, advice)
    except SlotlineError as error:
        yield f"plugins  {error.message}"
        advice.append("Repair or uninstall that plugin, or set SLOTLINE_PLUGINS= to run without outside plugins.")


def _backends(manager: PluginManager, advice: list[str]) -> Iterator[str]:
    for name, entry in sorted(manager.registry("backends").items()):
        yield f"backend {name}  {entry.unavailable() or f'ready ({_devices(entry)})'}"
    try:
        yield f"backend auto  {manager.backend('auto').name}"
    except SlotlineError as error:
        yield f"backend auto  {error.message}"
        advice.append("Install PyTorch, without which only the echo backend runs: pip install torch.")


def _caches(manager: PluginManager, advice: list[str]) -> Iterator[str]:
    """Check the folders that sources say they keep models in."""
    folders = {getattr(source, "cache_folder", None) for source in manager.registry("model_sources").values()}
    for folder in sorted(Path(folder) for folder in folders if folder is not None):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        writable = os.access(there, os.W_OK | os.X_OK)
        yield f"cache  {folder}, {'writable' if writable else 'not writable'}"
        if not writable:
            advice.append(f"Make {there} writable, or set SLOTLINE_CACHE to a folder that is.")


def _devices(entry: BackendEntry) -> str:
    """Return the devices of a backend; making it may import a lot, and may fail."""
    try:
        backend: Any = entry.create()
        return ", ".join(backend.capabilities.devices)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _gpus() -> str:
    """Ask torch in a process of its own: a broken driver may end that one."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"torch ended with code {done.returncode}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
