"""How large the KV cache becomes: as asked for, or as much as makes sense within free memory. No torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slotline.config import EngineConfig
from slotline.errors import ConfigError, ModelError

BLOCK_SIZES = (16, 32, 64, 128)
USUAL_LENGTH = 2048  # tokens per slot that the default size provides for
CPU_SHARE = 0.3  # of free memory that the default size may take: the machine has other things to do
GPU_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of the KV cache.

    Attributes:
        num_blocks: block 0, the scratch block, included.
        bytes_per_block: over all layers.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.num_blocks * self.bytes_per_block


def longest_sequence(config: EngineConfig, context_length: int, shareable: int | None = None) -> int:
    """Return the longest sequence, in tokens.

    Args:
        shareable: the longest whose prefixes may be shared; None = all.

    Raises:
        ConfigError: max_model_len is longer than what the model was made for, or than prefix caching allows.
    """
    limit = context_length
    if shareable is not None and config.prefix_caching:
        limit = min(limit, shareable)
    if config.max_model_len is None:
        return limit
    if limit < config.max_model_len <= context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but beyond {limit} tokens keys of {config.model} depend on the "
            "length of the prompt and cannot be shared; set prefix_caching to False, or max_model_len to "
            f"{limit} or less"
        )
    if config.max_model_len > context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; allowed: 2 to {context_length}, the context of {config.model}"
        )
    return config.max_model_len


def cache_size(config: EngineConfig, *, max_model_len: int, bytes_per_token: int, free: int, share: float) -> CacheSize:
    """Return how many blocks to allocate.

    Args:
        free: bytes of device memory that are free now, weights loaded.
        share: of it that the default size may take.

    Raises:
        ConfigError: the block size is not supported, or the cache does not fit, with the numbers.
    """
    size = BLOCK_SIZES[0] if config.block_size is None else config.block_size
    if size not in BLOCK_SIZES:
        raise ConfigError(f"block_size is {size}; allowed with backend torch: {', '.join(map(str, BLOCK_SIZES))}")
    per_block = size * bytes_per_token
    if config.kv_cache_tokens is not None:
        blocks = _asked(config.kv_cache_tokens, size, per_block, free)
    else:
        blocks = _affordable(config, size, per_block, free, share, max_model_len)
    return CacheSize(blocks + 1, size, per_block)


def _asked(tokens: int, size: int, per_block: int, free: int) -> int:
    blocks = -(-tokens // size)
    if (blocks + 1) * per_block > free:
        raise ConfigError(
            f"kv_cache_tokens is {tokens}, which takes {_mib(blocks * per_block)}, but {_mib(free)} are free; "
            f"allowed here: up to {max(free // per_block - 1, 0) * size}"
        )
    return blocks


def _affordable(config: EngineConfig, size: int, per_block: int, free: int, share: float, max_model_len: int) -> int:
    one = -(-max_model_len // size)
    if config.kv_cache_fraction is not None:
        blocks = int(free * config.kv_cache_fraction) // per_block - 1
        limit, option = blocks, f"kv_cache_fraction is {config.kv_cache_fraction:g}"
    else:
        usual = config.max_slots * -(-min(max_model_len, USUAL_LENGTH) // size)
        blocks = max(min(usual, int(free * share) // per_block - 1), one)
        limit, option = free // per_block - 1, f"{_mib(free)} of memory are free"
    if limit < one:
        raise ConfigError(
            f"{option}, but one sequence of max_model_len {max_model_len} tokens takes {_mib(one * per_block)} of KV "
            f"cache; set max_model_len to {max(limit, 0) * size} or less, or give more memory"
        )
    return blocks


def give_back() -> None:
    """Let others on the device have the memory that the allocator keeps for later."""
    import torch  # `slotline inspect` reads this file, and works without it

    with suppress(RuntimeError):  # of a device that failed; whoever uses it next hears of it, closing need not
        torch.cuda.empty_cache()


@contextmanager
def refusing_what_is_too_large(model: str, device: object) -> Iterator[None]:
    """Say what to do where the device's memory runs out while loading, and free what was loaded so far.

    Raises:
        ModelError: in place of torch's error.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors, for as long as somebody holds the error
        give_back()
        raise ModelError(
            f"{model} does not fit into the memory of {device}; use fewer max_slots, a smaller max_model_len "
            f"or kv_cache_tokens, or another GPU ({str(error).splitlines()[0]})"
        ) from error


def free_host_memory() -> int:
    """Return the bytes of memory that this process may still take, its container's limit observed."""
    free = _available()
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of what the machine has is a fair guess
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
