"""Programmatic dependent launch: programs of a kernel start while the kernel before drains, and wait before they read.

A kernel takes part by calling `release` first, which lets the next one start, and `wait` before its first access to
anything that an earlier kernel writes or still reads. What no kernel writes, weights above all, may be loaded before.
Each of its programs must wait, also those without work: a kernel counts as done when its programs are, and the next one
relies on everything before it being done, too. So only kernels that wait may be launched this way.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slotline.kernels.launch import jit


@jit
def release(DEPENDENT: tl.constexpr) -> None:
    """Let the programs of the next kernel start."""
    if DEPENDENT:
        gdc_launch_dependents()


@jit
def wait(DEPENDENT: tl.constexpr) -> None:
    """Wait until all kernels before this one are done and what they wrote can be read."""
    if DEPENDENT:
        gdc_wait()


def launching(dependent: bool, device: torch.device) -> dict[str, Any]:
    """Return the kernel's constant and the launch's option, both off where the device has no such thing."""
    if not (dependent and device.type == "cuda" and _supported(device.index)):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@cache
def _supported(index: int | None) -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index)[0] >= 9
