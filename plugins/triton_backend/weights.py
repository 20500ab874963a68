"""A checkpoint's tensors on the GPU, joined for the kernels: halves of a head rotate together, as in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slotline.errors import UnsupportedModel
from slotline.kernels.gate import gate
from slotline.kernels.gemm import gemm
from slotline.kernels.gemv import gemv
from slotline.kernels.rms_norm import rms_norm
from slotline.kernels.rotate_and_store import HeadNorms
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.rope import rope_inv_freq
from slotline.plugins.triton_backend.products import add, adds, compute
from slotline.plugins.triton_backend.tuning import Product, Tuning, Use, Way

if TYPE_CHECKING:
    from slotline.plugins.models.checkpoint import Checkpoint

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product; bias may be None. ``exact``: a row has the same bits in any company."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    exact: bool
    tuning: Tuning
    zeros: Tensor  # [out], see `compute`

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for [T, in]."""
        if self.exact:
            return gemm(x, self.weight, self.bias)
        if len(x) == 1:
            return gemv(x, self.weight, self.bias, dependent=True)
        return self._compute(x, Use.PLAIN)

    def normed(self, x: Tensor) -> Tensor:
        """Return [T, out] for [T, in], or [parts, T, out] that a norm adds up."""
        if self.exact or len(x) == 1:
            return self(x)
        return self._compute(x, Use.NORMED)

    def adds(self, count: int) -> bool:
        """Tell whether ``add`` is faster for ``count`` rows than leaving it to the norm to add the product up."""
        return self.bias is None and not self.exact and adds(self._way(Use.NORMED, count), count)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add the product [T, out] of [T, in] to a residual, in place."""
        add(x, self.weight, residual)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return [T, out / 2] act(gate) * up for weights of gate rows, then up rows."""
        if self.exact:
            return gate(gemm(x, self.weight, self.bias), activation)
        if len(x) == 1:
            return gemv(x, self.weight, self.bias, activation=activation, dependent=True)
        return self._compute(x, Use.GATED, activation)

    def logits(self, x: Tensor) -> Tensor:
        """Return [T, out] in float32."""
        if self.exact:
            return gemm(x, self.weight, out_dtype=torch.float32)
        if len(x) == 1:
            return gemv(x, self.weight, out_dtype=torch.float32, dependent=True)
        return self._compute(x, Use.LOGITS)

    def compile(self, use: Use, activation: str, most: int) -> None:
        """Compute with up to ``most`` rows in every way that there is, so that none is compiled later."""
        if self.exact:
            return
        rows, columns = self.weight.shape
        for count in self.tuning.turns(Product(rows, columns, use)):
            if count <= most:
                found = self._compute(self.weight.new_zeros(count, columns), use, activation)
                if use is Use.NORMED:  # the norm behind it adds a residual, or it is a post norm, which does not
                    for residual in (self.weight.new_zeros(count, rows), None):
                        rms_norm(found, self.weight.new_ones(rows), 1e-5, residual)

    def _compute(self, x: Tensor, use: Use, activation: str = "silu") -> Tensor:
        way = self._way(use, len(x))
        return compute(way, x, self.weight, self.bias, use, activation, zeros=self.zeros)

    def _way(self, use: Use, count: int) -> Way:
        rows, columns = self.weight.shape
        return self.tuning.way(Product(rows, columns, use), count, self.weight.element_size())


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; ``kind`` is its index among the description's ``layer_kinds``."""

    kind: int
    attn_norm: Tensor  # [C]
    qkv: Linear  # [T, C] to [T, (Hq + 2 Hkv) D]
    head_norms: HeadNorms | None
    out: Linear  # [T, Hq D] to [T, C]
    attn_post_norm: Tensor | None  # [C]
    mlp_norm: Tensor  # [C]
    gate_up: Linear  # [T, C] to [T, 2 I]
    down: Linear  # [T, I] to [T, C]
    mlp_post_norm: Tensor | None  # [C]


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything the decoder computes with.

    Attributes:
        angles: for each kind of layer [positions, D] float32, cosines, then sines.
        activation: of the gate, as the kernel names it.
        nbytes: of all of it.
    """

    embed: Tensor  # [V, C]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [C]
    head: Linear  # [T, C] to [T, V]
    angles: tuple[Tensor, ...]
    activation: str
    nbytes: int

    def compile_products(self, tokens: int, rows: int) -> None:
        """Compile what products of up to ``tokens`` tokens, and logits of up to ``rows`` rows, take."""
        uses = {"qkv": Use.PLAIN, "out": Use.NORMED, "gate_up": Use.GATED, "down": Use.NORMED}
        seen: set[tuple[Use, torch.Size]] = set()
        for layer in self.layers:
            for name, use in uses.items():
                linear: Linear = getattr(layer, name)
                if (use, linear.weight.shape) not in seen:
                    seen.add((use, linear.weight.shape))
                    linear.compile(use, self.activation, tokens)
        self.head.compile(Use.LOGITS, self.activation, rows)


def load_weights(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    exact: bool,
    tuning: Tuning,
) -> Weights:
    """Read a checkpoint into memory of the device; ``exact`` products do not depend on the other rows.

    Raises:
        CheckpointError: a tensor is damaged.
        ModelError: the model needs something that this backend does not have yet.
    """
    config = checkpoint.config
    _check(config)
    reader = _Reader(checkpoint, device, dtype, exact, tuning)
    embed = reader.tensor("embed")
    return Weights(
        embed=embed,
        layers=tuple(_layer(reader, i, config) for i in range(config.num_layers)),
        final_norm=reader.tensor("final_norm"),
        head=reader.product(embed if config.tie_embeddings else reader.tensor("lm_head"), None),
        angles=tuple(_angles(config, kind, positions, device) for kind in range(len(config.layer_kinds))),
        activation=ACTIVATIONS[config.hidden_act],
        nbytes=reader.nbytes,
    )


def _check(config: DecoderConfig) -> None:
    if config.hidden_act not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise UnsupportedModel(f"hidden_act is {config.hidden_act!r}; backend triton knows {known}; use backend torch")
    if config.rotary_dim not in (None, config.head_dim):
        raise UnsupportedModel("the model turns a part of each head, which backend triton cannot; use backend torch")
    if any(kind.rope.dynamic_from for kind in config.layer_kinds):
        raise UnsupportedModel(
            "the model scales its rotation by length, which backend triton cannot; use backend torch"
        )


def _angles(config: DecoderConfig, kind: int, positions: int, device: torch.device) -> Tensor:
    rope = config.layer_kinds[kind].rope
    turn = torch.outer(torch.arange(positions, dtype=torch.float32), rope_inv_freq(rope))  # [positions, D / 2]
    return (torch.cat([turn.cos(), turn.sin()], -1) * rope.magnitude).to(device)


class _Reader:
    """Read tensors one at a time, move them to the device, and count their bytes."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, exact: bool, tuning: Tuning
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._exact = exact
        self._tuning = tuning
        self._zeros: dict[int, Tensor] = {}
        self.nbytes = 0

    def tensor(self, *names: str) -> Tensor:
        """Return the named tensors joined by their first dimension."""
        parts = [self._checkpoint.tensor(name).to(self._device, self._dtype) for name in names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.nbytes += joined.nbytes
        return joined.contiguous()

    def linear(self, prefix: str, parts: str, *, biased: bool) -> Linear:
        names = [prefix + part for part in parts.split()]
        bias = self.tensor(*(f"{n}_bias" for n in names)) if biased else None
        return self.product(self.tensor(*names), bias)

    def product(self, weight: Tensor, bias: Tensor | None) -> Linear:
        rows = len(weight)
        if rows not in self._zeros:
            self._zeros[rows] = weight.new_zeros(rows)
        return Linear(weight, bias, self._exact, self._tuning, self._zeros[rows])


def _layer(reader: _Reader, index: int, config: DecoderConfig) -> Layer:
    prefix = f"layers.{index}."

    def post_norm(name: str) -> Tensor | None:
        return reader.tensor(prefix + name) if config.post_norms else None

    norms = None
    if config.qk_norm:
        norms = HeadNorms(reader.tensor(f"{prefix}q_norm"), reader.tensor(f"{prefix}k_norm"), config.rms_eps)
    return Layer(
        kind=config.kind_of(index),
        attn_norm=reader.tensor(f"{prefix}attn_norm"),
        qkv=reader.linear(prefix, "q k v", biased=config.attention_bias),
        head_norms=norms,
        out=reader.linear(prefix, "o", biased=config.output_bias),
        attn_post_norm=post_norm("attn_post_norm"),
        mlp_norm=reader.tensor(f"{prefix}mlp_norm"),
        gate_up=reader.linear(prefix, "gate up", biased=config.mlp_bias),
        down=reader.linear(prefix, "down", biased=config.mlp_bias),
        mlp_post_norm=post_norm("mlp_post_norm"),
    )
