"""TorchBackend: the Backend protocol on plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from slotline.backend import ALL_PARAMS, BackendInfo, Capabilities, StepHandle
from slotline.config import EngineConfig
from slotline.errors import ConfigError, ModelError
from slotline.model import Model
from slotline.plan import StepPlan
from slotline.plugins.torch_backend.attention import AttentionPlanner, Heads
from slotline.plugins.torch_backend.decoder import Decoder
from slotline.plugins.torch_backend.linear import QUANTIZED
from slotline.plugins.torch_backend.memory import (
    BLOCK_SIZES,
    CPU_SHARE,
    GPU_SHARE,
    CacheSize,
    cache_size,
    free_host_memory,
    give_back,
    longest_sequence,
    refusing_what_is_too_large,
)
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.rotation import dynamic_from
from slotline.plugins.torch_backend.sampler import Sampler
from slotline.plugins.torch_backend.step import Runner, run_step
from slotline.plugins.torch_backend.weights import load_weights

if TYPE_CHECKING:
    from slotline.plugins.models.checkpoint import Checkpoint
    from slotline.plugins.models.decoder import DecoderConfig
    from slotline.plugins.processors import ProcessorFactory

CPU_BATCH_TOKENS = 512  # a longer step would keep rows that decode waiting for most of a second
GPU_BATCH_TOKENS = 8192
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend:
    """Run a decoder with PyTorch operators alone, on a CPU or a CUDA GPU.

    With ``deterministic=True`` each row's tokens and log-probabilities are bitwise the same in any
    company, however its prompt is chunked, preempted or cached.

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
            embeddings=True,
            logprobs_modes=("raw", "processed"),
            params=ALL_PARAMS,
            processors=frozenset(self.processors),
            quantizations=tuple(QUANTIZED),
            kv_dtypes=tuple(_DTYPES),
            block_sizes=BLOCK_SIZES,
            devices=("cpu", "cuda"),
            pipeline_depth=1,
            deterministic=True,
        )

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        """Load weights and allocate the KV cache.

        Raises:
            ConfigError: device, dtype or cache size cannot be had, with one sentence that says what to do.
            ModelError: the model brings no weights that this backend can read, or does not fit.
        """
        if model.checkpoint is None:
            raise ModelError(f"{model.name} has no weights; choose a model with weights, or backend echo")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        dtype = choose_dtype(config, device)
        with torch.inference_mode(), refusing_what_is_too_large(model.name, device):
            self._runner = self._build(config, model, device, dtype)
        return self._runner.info

    def launch(self, plan: StepPlan) -> StepHandle:
        """Run a step. What it raises comes out of the handle's ``result``."""
        return run_step(self._loaded(), plan)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows that ended."""
        self._loaded().release(rows)

    def close(self) -> None:
        """Free everything; idempotent."""
        self._runner = None
        give_back()

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the backend is not loaded, or closed")
        return self._runner

    def _build(self, config: EngineConfig, model: Model, device: torch.device, dtype: torch.dtype) -> Runner:
        checkpoint: Checkpoint = model.checkpoint
        decoder_config = checkpoint.config
        longest = longest_sequence(config, model.context_length, dynamic_from(decoder_config))
        weights = load_weights(
            checkpoint, device=device, dtype=dtype, positions=longest, quantization=config.quantization
        )
        size = _size_cache(config, decoder_config, device, dtype, longest)
        places = size.num_blocks * size.block_size
        width = 2 * decoder_config.num_kv_heads * decoder_config.head_dim
        pool = torch.empty((decoder_config.num_layers, places, width), dtype=dtype, device=device)
        info = BackendInfo(
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            bytes_per_block=size.bytes_per_block,
            max_model_len=longest,
            vocab_size=model.vocab_size,
            memory_report={"weights": weights.nbytes, "kv_cache": size.nbytes},
            batch_tokens=CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS,
        )
        heads = Heads(
            decoder_config.num_heads,
            decoder_config.num_kv_heads,
            decoder_config.head_dim,
            decoder_config.head_dim**-0.5 if decoder_config.query_scale is None else decoder_config.query_scale,
            decoder_config.attention_softcap,
        )
        windows = [kind.window for kind in decoder_config.layer_kinds]
        processors = Processors(self.processors, info)
        return Runner(
            info=info,
            device=device,
            decoder=Decoder(decoder_config, weights, deterministic=config.deterministic),
            planner=AttentionPlanner(heads, windows, device, dtype, deterministic=config.deterministic),
            pool=pool,
            sampler=Sampler(processors),
            processors=processors,
            uses_lengths=dynamic_from(decoder_config) is not None,
        )


def choose_device(name: str) -> torch.device:
    """Return the device that a config names; auto is CUDA where there is one.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; allowed with backend torch: auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA GPUs; use device cpu")
    return device


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights, activations and KV cache.

    auto is float32 on a CPU and in deterministic mode, else bfloat16.

    Raises:
        ConfigError: float16 on a CPU, where it is slow and overflows.
    """
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" or config.deterministic else torch.bfloat16
    if config.dtype == "float16" and device.type == "cpu":
        raise ConfigError("dtype is 'float16', which is slow and overflows on a CPU; use float32 or bfloat16")
    return _DTYPES[config.dtype]


def _size_cache(
    config: EngineConfig, decoder: DecoderConfig, device: torch.device, dtype: torch.dtype, longest: int
) -> CacheSize:
    on_gpu = device.type == "cuda"
    return cache_size(
        config,
        max_model_len=longest,
        bytes_per_token=2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * dtype.itemsize,
        free=torch.cuda.mem_get_info(device)[0] if on_gpu else free_host_memory(),
        share=GPU_SHARE if on_gpu else CPU_SHARE,
    )
