"""The reference backend: plain PyTorch on a CPU or a CUDA GPU, and the oracle for the others.

Importing this package does not import torch; choosing the backend does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from slotline.backend import Backend, BackendEntry
from slotline.hookspecs import hookimpl


@hookimpl
def slotline_register_backends(register: Callable[[BackendEntry], None]) -> None:
    """Register the backend ``torch``."""
    register(
        BackendEntry(
            name="torch",
            create=_create,
            unavailable=_unavailable,
            auto_priority=10,
            summary="plain PyTorch on a CPU or a CUDA GPU; with deterministic=True the oracle for the others",
        )
    )


def _create() -> Backend:
    from slotline.plugins.torch_backend.backend import TorchBackend

    return TorchBackend()


def _unavailable() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed; run: pip install torch"
    return None
