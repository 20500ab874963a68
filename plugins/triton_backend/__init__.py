"""The backend of Triton kernels for NVIDIA GPUs.

Importing this package imports neither torch nor triton; choosing the backend does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from slotline.backend import Backend, BackendEntry
from slotline.hookspecs import hookimpl


@hookimpl
def slotline_register_backends(register: Callable[[BackendEntry], None]) -> None:
    """Register the backend ``triton``."""
    register(
        BackendEntry(
            name="triton",
            create=_create,
            unavailable=_unavailable,
            auto_priority=20,
            summary="Triton kernels on an NVIDIA GPU",
        )
    )


@hookimpl
def slotline_register_commands(register: Callable[[Any], None]) -> None:
    """Register ``slotline tune``."""
    from slotline.plugins.triton_backend.tune_command import tune_models

    register(tune_models)


def _create() -> Backend:
    from slotline.plugins.triton_backend.backend import TritonBackend

    return TritonBackend()


def _unavailable() -> str | None:
    for module, name in (("torch", "PyTorch"), ("triton", "Triton")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed; run: pip install {module}"
    if os.environ.get("TRITON_INTERPRET") == "1":  # kernels run on a CPU, for tests
        return None
    import torch

    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU; choose backend torch"
