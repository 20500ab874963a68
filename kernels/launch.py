"""What the ops share on the host's side: the decorator, block widths, launch settings, and checks that need no sync.

Block widths are part of an op's result where it sums in float32, so they are constants: a row must come out the same
in every batch. The number of warps decides the order of such sums inside a block, and is constant per kernel, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

Decorator = Callable[[Callable[..., Any]], Any]

_KERNELS: list[Any] = []


def jit(function: Callable[..., Any]) -> Any:
    """Make a kernel, or a function that kernels call."""
    _KERNELS.append(triton.jit(function))
    return _KERNELS[-1]


BLOCK = 4096  # ids that one program takes in a pass over a row
GROUP = 32  # ids whose maximum stands for them when the best of a row are sought
POOL = 2048  # candidates of a row that are sorted in one go
# As many are compared with each other where they are enough; the interpreter takes seconds to sort.
SHORT = 512 if os.environ.get("TRITON_INTERPRET") == "1" else 128
PART = 32  # of those that are compared with all of them at a time
PROGRAMS = 2048  # that a pass is made of, or one a row
LINES = 64  # groups that a program reads at a time
STRIDE = 8192  # ids that a program takes at a time when it walks a row
LIST = 1024  # ids that a program takes at a time from a list
MAX_VOCAB = 1 << 19  # an id and its 45-bit weight share 64 bits
MAX_BLOCKS = MAX_VOCAB // BLOCK
MAX_WIDTH = 1024  # of a table of the best

# Half of a multiprocessor's registers: two rows at a time on each.
_REGISTERS = {"combine": 64, "compare": 64}
_WARPS = {"pass": 8, "combine": 16, "compare": 16, "walk": 16, "list": 4, "scalar": 1}


def varying(*names: str) -> Decorator:
    """Return `jit` for a kernel whose integers ``names`` vary from call to call: no value of theirs is compiled in."""

    def decorate(function: Callable[..., Any]) -> Any:
        _KERNELS.append(triton.jit(do_not_specialize=list(names))(function))
        return _KERNELS[-1]

    return decorate


def compiled() -> int:
    """Return how many variants of the kernels this process has compiled, or loaded from Triton's cache."""
    caches = [cache for kernel in _KERNELS for cache in getattr(kernel, "device_caches", {}).values()]
    return sum(len(cache[0]) for cache in caches)


def settings(kind: str) -> dict[str, Any]:
    """Return the launch settings of a kernel that passes over blocks, combines, sorts, walks a row, or reads a list.

    Products are not fused with sums: that would round once where the formulas, and the references, round twice.
    """
    return {"num_warps": _WARPS[kind], "maxnreg": _REGISTERS.get(kind), "num_stages": 2, "enable_fp_fusion": False}


def programs(rows: int, count: int) -> int:
    """Return how many programs take the blocks of a row in turns, where many rows need none."""
    return max(1, min(count, PROGRAMS // rows))


def blocks(vocab: int) -> int:
    """Return how many blocks a row has."""
    return -(-vocab // BLOCK)


def padded(count: int) -> int:
    """Return the next power of two, the width of a program that takes ``count`` things at once."""
    return max(16, 1 << (count - 1).bit_length())


def floats(device: torch.device, *shape: int) -> Tensor:
    """Return float32 scratch."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def ints(device: torch.device, *shape: int) -> Tensor:
    """Return int32 scratch."""
    return torch.empty(shape, dtype=torch.int32, device=device)


def longs(device: torch.device, *shape: int) -> Tensor:
    """Return int64 scratch."""
    return torch.empty(shape, dtype=torch.int64, device=device)


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Return R and V of logits [R, V], or raise if the kernels cannot read them."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be float32 rows [R, V], not {logits.dtype} {tuple(logits.shape)}")
    if not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"a vocabulary of {logits.shape[1]} is not between 1 and {MAX_VOCAB}")
    return logits.shape[0], logits.shape[1]


def check_columns(length: int, device: torch.device, /, **columns: tuple[Tensor, torch.dtype]) -> None:
    """Raise if a per-row tensor has another length, type or device."""
    for name, (column, dtype) in columns.items():
        if column.shape != (length,) or column.dtype != dtype or column.device != device or not column.is_contiguous():
            found = f"{column.dtype} {tuple(column.shape)} on {column.device}"
            raise ValueError(f"{name} must be contiguous {dtype} [{length}] on {device}, not {found}")
