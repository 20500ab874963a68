"""The decoder description: what a backend must know of a transformer, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    Attributes:
        kind: "linear" (all by ``factor``), "llama3" (low frequencies by ``factor``, a smooth band
            between), or "factors" (each by its own number, as GGUF stores them).
        original_context_length: tokens the model was first trained on; used by "llama3".
        factors: [head_dim / 2] divisors; used by "factors".
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One pre-norm decoder-only transformer.

    Attributes:
        head_dim: width of one attention head; not always hidden_size / num_heads.
        num_kv_heads: num_heads for multi-head, 1 for multi-query, between for grouped attention.
        context_length: longest sequence the model was made for, in tokens.
        tie_embeddings: the head is the embedding matrix; there is no tensor ``lm_head``.
        attention_bias: q, k, v and o have biases.
        mlp_bias: gate, up and down have biases.
        sliding_window: tokens each one sees, or None for all.
        qk_norm: q and k are RMS-normalised per head before the rotation.
        hidden_act: the gate's activation, as Hugging Face names it.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    qk_norm: bool = False
    hidden_act: str = "silu"


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the decoder by its canonical name.

    Matrices are [out, in], as ``torch.nn.functional.linear`` takes them.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in _layer_tensors(config).items()})
    shapes["final_norm"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (query, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    biased = ("q", "k", "v", "o") * config.attention_bias + ("gate", "up", "down") * config.mlp_bias
    shapes.update({f"{name}_bias": shapes[name][:1] for name in biased})
    if config.qk_norm:
        shapes.update(q_norm=(config.head_dim,), k_norm=(config.head_dim,))
    return shapes


def rope_inv_freq(config: DecoderConfig) -> torch.Tensor:
    """Return [head_dim / 2] float32 radians per position, scaling applied.

    The rotation pairs channel i with channel i + head_dim / 2 (the half-split layout), which is how
    checkpoints hand out q and k.
    """
    import torch

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq: torch.Tensor = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "factors":
        return freq / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(freq, scaling)


def _llama3(freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide frequencies with long waves by the factor, keep short ones, blend those between."""
    import torch

    original, low, high = scaling.original_context_length, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / freq
    stretched = torch.where(waves > original / low, freq / scaling.factor, freq)
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = (waves >= original / high) & (waves <= original / low)
    return torch.where(between, blended, stretched)
