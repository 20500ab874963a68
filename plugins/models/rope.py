"""Rotary frequencies: how fast each pair of channels turns, and what stretches them over longer contexts."""

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
        kind: "linear" (all by ``factor``), "dynamic" (a larger base, once a sequence is longer than
            ``original_context_length``), "llama3" (low frequencies by ``factor``, a smooth band between),
            "yarn" (the same between two numbers of turns, ``beta_slow`` and ``beta_fast``), or "factors" (each
            by its own number, as GGUF stores them).
        original_context_length: tokens the model was first trained on; used by "dynamic", "llama3" and "yarn".
        attention_factor: multiplies rotated queries and keys; used by "yarn".
        truncate: the ends of yarn's band are whole channels.
        factors: [rotary_dim / 2] divisors; used by "factors".
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embeddings of one kind of layer.

    Attributes:
        theta: the base of the frequencies.
        dim: channels of each head that turn; the rest stay as they are.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    @property
    def magnitude(self) -> float:
        """Return what rotated queries and keys are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    @property
    def dynamic_from(self) -> int | None:
        """Return the length above which frequencies depend on a sequence's length; None = they never do."""
        scaling = self.scaling
        return scaling.original_context_length if scaling is not None and scaling.kind == "dynamic" else None


def rope_inv_freq(rope: Rope) -> torch.Tensor:
    """Return [dim / 2] float32 radians per position, scaling applied; "dynamic" as for short sequences.

    The rotation pairs channel i with channel i + dim / 2 (the half-split layout), which is how
    checkpoints hand out q and k.
    """
    import torch

    freq: torch.Tensor = 1.0 / (rope.theta ** _exponents(rope))
    scaling = rope.scaling
    if scaling is None or scaling.kind == "dynamic":
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "factors":
        return freq / torch.tensor(scaling.factors, dtype=torch.float32)
    return _yarn(rope, freq, scaling) if scaling.kind == "yarn" else _llama3(freq, scaling)


def dynamic_inv_freq(rope: Rope, lengths: torch.Tensor) -> torch.Tensor:
    """Return [T, dim / 2] radians per position for sequences of [T] lengths, with "dynamic" scaling.

    The base grows with the length beyond the original context, so that the slowest channels never turn further than
    they did in training.
    """
    scaling = rope.scaling
    assert scaling is not None
    original, factor = scaling.original_context_length, scaling.factor
    stretch = lengths.clamp(min=original) * factor / original - (factor - 1)  # [T]
    base = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
    inv_freq: torch.Tensor = 1.0 / (base[:, None] ** _exponents(rope).to(lengths.device))
    return inv_freq


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return how much yarn sharpens attention for a stretch of ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _exponents(rope: Rope) -> torch.Tensor:
    import torch

    return torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim


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


def _yarn(rope: Rope, freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Keep channels that turn often within the original context, divide those that turn rarely, blend between."""
    import torch

    def channel(turns: float) -> float:
        """Return the channel pair that makes so many turns in the original context."""
        wave = scaling.original_context_length / (turns * 2 * math.pi)
        return rope.dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freq / scaling.factor * ramp + freq * (1 - ramp)
