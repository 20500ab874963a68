"""TritonBackend: the Backend protocol on Triton kernels and library products.

Requests that ask for what the recorded steps do not have (lists of tokens, processors, masks, wide or processed tables
of logprobs) are sampled step by step, with the torch backend's code for the first three.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slotline.backend import ALL_PARAMS, BackendInfo, Capabilities, StepHandle
from slotline.config import EngineConfig
from slotline.errors import ConfigError, ModelError
from slotline.kernels.row_layout import PAGE
from slotline.model import Model
from slotline.plan import StepPlan
from slotline.plugins.models.cache import cache_dir
from slotline.plugins.torch_backend.backend import GPU_BATCH_TOKENS
from slotline.plugins.torch_backend.memory import (
    CPU_SHARE,
    GPU_SHARE,
    cache_size,
    free_host_memory,
    give_back,
    longest_sequence,
    refusing_what_is_too_large,
)
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.step import Failed
from slotline.plugins.triton_backend.decoder import Decoder
from slotline.plugins.triton_backend.graphs import StepGraphs
from slotline.plugins.triton_backend.rows import RowTable, new_seen, new_state
from slotline.plugins.triton_backend.runner import PROMPT_CHUNK, Runner
from slotline.plugins.triton_backend.tuning import Tuning
from slotline.plugins.triton_backend.warmup import scratch_bytes, warm_up
from slotline.plugins.triton_backend.weights import load_weights

if TYPE_CHECKING:
    from slotline.plugins.models.checkpoint import Checkpoint
    from slotline.plugins.processors import ProcessorFactory

log = logging.getLogger("slotline.triton")

DTYPES = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TILE_TOKENS = 128  # rows of a tile in large products, the library's as well as ours


class TritonBackend:
    """Run a decoder on Triton kernels, on a CUDA GPU (or, interpreted, on a CPU).

    Attributes:
        processors: logits processors by name; the engine fills it in before ``load``.
    """

    def __init__(self) -> None:
        self.processors: Mapping[str, ProcessorFactory] = {}
        self._runner: Runner | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Say what this backend can do."""
        return Capabilities(
            logprobs=True,
            max_logprobs=1024,
            prompt_logprobs=True,
            logprobs_modes=("raw", "processed"),
            params=ALL_PARAMS,
            processors=frozenset(self.processors),
            kv_dtypes=("bfloat16", "float16", "float32"),
            block_sizes=(PAGE,),
            devices=("cuda",),
            pipeline_depth=2,
            deterministic=True,
            embeddings=True,
        )

    @property
    def padded_tokens(self) -> int:
        """Return how many positions were computed for nothing."""
        return 0 if self._runner is None else self._runner.padded_tokens

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        """Load weights, allocate the KV cache, record the decode step for each batch size.

        Raises:
            ConfigError, ModelError: with one sentence that says what to do.
        """
        if model.checkpoint is None:
            raise ModelError(f"{model.name} has no weights; choose a model with weights, or backend echo")
        device = choose_device(config.device)
        with torch.inference_mode(), refusing_what_is_too_large(model.name, device):
            self._runner, info = self._build(config, model, device, _choose_dtype(config, device))
        # A full pass of the garbage collector looks at all that is loaded, and halts all streams for a tenth of a
        # second now and then. Recording began with one; from here on they leave out what is there.
        gc.freeze()
        return info

    def launch(self, plan: StepPlan) -> StepHandle:
        """Launch a step. What it raises comes out of the handle's ``result``."""
        try:
            with torch.inference_mode():
                return self._loaded().launch(plan)
        except Exception as error:
            return Failed(error)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows that ended."""
        self._loaded().rows.release(rows)

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            gc.unfreeze()
        give_back()

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the backend is not loaded, or closed")
        return self._runner

    def _build(
        self, config: EngineConfig, model: Model, device: torch.device, dtype: torch.dtype
    ) -> tuple[Runner, BackendInfo]:
        checkpoint: Checkpoint = model.checkpoint
        decoder_config = checkpoint.config
        longest = longest_sequence(config, model.context_length)
        exact = config.deterministic
        tuning = Tuning.of(device_name(device), [cache_dir() / "tuned"])
        weights = load_weights(checkpoint, device=device, dtype=dtype, positions=longest, exact=exact, tuning=tuning)
        slots, batch_tokens = config.max_slots, config.max_batch_tokens or GPU_BATCH_TOKENS
        heads, dim = decoder_config.num_kv_heads, decoder_config.head_dim

        def pool_of(blocks: int) -> Tensor:
            return torch.zeros((decoder_config.num_layers, 2, blocks, heads, PAGE, dim), dtype=dtype, device=device)

        state, seen = new_state(slots, longest, device), new_seen(slots, model.vocab_size, device)
        scratch = scratch_bytes(Decoder(decoder_config, weights, pool_of(1), state, longest), batch_tokens)
        size = cache_size(
            config.with_options(block_size=PAGE),
            max_model_len=longest,
            bytes_per_token=decoder_config.kv_values_per_token * dtype.itemsize,
            free=max(_free_memory(device) - 2 * scratch, 0),  # once for steps, once for recordings
            share=GPU_SHARE if device.type == "cuda" else CPU_SHARE,
        )
        info = BackendInfo(
            num_blocks=size.num_blocks,
            block_size=PAGE,
            bytes_per_block=size.bytes_per_block,
            max_model_len=longest,
            vocab_size=model.vocab_size,
            memory_report={
                "weights": weights.nbytes,
                "kv_cache": size.nbytes,
                "rows": state.nbytes + (0 if seen is None else seen.nbytes),
                "scratch": scratch,
            },
            batch_tokens=GPU_BATCH_TOKENS,
            tile_tokens=TILE_TOKENS,
        )
        processors = Processors(self.processors, info)
        decoder = Decoder(decoder_config, weights, pool_of(size.num_blocks), state, longest)
        before, held = _free_memory(device), _reserved(device)
        rows = RowTable(state, seen, model.vocab_size, processors)
        graphs = StepGraphs(decoder, slots, weights.embed.shape[1], dtype, seen, min(batch_tokens, longest))
        runner = Runner(decoder, rows, graphs, processors, model.vocab_size)
        if device.type == "cuda":
            # What was free may have grown meanwhile by what another process gave back.
            info.memory_report["graphs"] = max(before - _free_memory(device), _reserved(device) - held)
            weights.compile_products(batch_tokens, max(slots, PROMPT_CHUNK))
            warm_up(runner, slots=slots, longest=longest, batch_tokens=batch_tokens, blocks=size.num_blocks)
            log.info("triton: %s", ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in info.memory_report.items()))
        return runner, info


def _free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return free_host_memory()
    give_back()  # what the allocator keeps for later is free, too
    return torch.cuda.mem_get_info(device)[0]


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def device_name(device: torch.device) -> str:
    """Return what its maker calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choose_device(name: str) -> torch.device:
    """Return the device that a config names; auto is CUDA, or the CPU where Triton is interpreted.

    Raises:
        ConfigError: it is no CUDA GPU that is there.
    """
    if not torch.cuda.is_available():  # Triton is interpreted, or the backend would not have been chosen
        return torch.device("cpu")
    try:
        device = torch.device("cuda" if name == "auto" else name)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}; allowed with backend triton: auto, cuda or cuda:N")
    return device


def _choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto" and device.type == "cpu":
        return torch.float32  # interpreted products are wrong in bfloat16
    return DTYPES[config.dtype]
