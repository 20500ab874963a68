"""The forward pass: token ids to hidden states to logits, over all rows and tokens of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.torch_backend.attention import Attention
from slotline.plugins.torch_backend.weights import Layer, Weights

TILE = 16  # tokens that deterministic mode computes at once, always


class Decoder:
    """A transformer whose linear layers see the whole step.

    Libraries pick another order of summation for another number of tokens. With
    ``deterministic`` everything but attention therefore runs on tiles of TILE tokens, the last one
    padded: a token's result then depends on its own inputs alone.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, *, deterministic: bool) -> None:
        self._config = config
        self._weights = weights
        self._deterministic = deterministic
        self._dtype = weights.embed.dtype
        self._rotated = (config.num_heads + config.num_kv_heads) * config.head_dim  # channels of q and k

    def hidden(
        self, pool: Tensor, token_ids: Tensor, positions: Tensor, lengths: Tensor | None, attention: Attention
    ) -> Tensor:
        """Return [T, C] the last layer's output, normalised.

        Args:
            pool: [layers, places, 2 * K * D] keys and values, written and read.
            token_ids: [T]
            positions: [T]
            lengths: [T] of the token's sequence, where the rotation depends on it.
        """
        count = len(token_ids)
        w = self._weights
        # The residual stream is float32 whatever the weights are: rounding it at every layer costs most accuracy.
        x = self._padded(functional.embedding(token_ids, w.embed).float())  # [T, C]; T is now a multiple of TILE
        if self._config.embedding_scale != 1.0:
            x = x * self._config.embedding_scale
        rotations = [self._padded(rotation) for rotation in w.rotations(positions, lengths)]  # each [T, 1, D / 2]
        for layer, layer_pool in zip(w.layers, pool, strict=True):
            q, kv = self._by_tile(lambda a, r, layer=layer: self._before(layer, a, r), x, rotations[layer.kind])
            answered = attention(layer.kind, layer_pool, q[:count], kv[:count])  # [T, H D]
            (x,) = self._by_tile(lambda a, y, layer=layer: (self._after(layer, a, y),), x, self._padded(answered))
        (x,) = self._by_tile(lambda a: (self._norm(a, w.final_norm).to(self._dtype),), x)
        return x[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, V] in float32 for hidden states [T, C]."""
        (logits,) = self._by_tile(lambda a: (self._weights.head(a),), self._padded(hidden))
        cap = self._config.logit_softcap
        return logits[: len(hidden)] if cap is None else torch.tanh(logits[: len(hidden)] / cap) * cap

    def _before(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [T, H, D], and keys and values [T, 2 * K * D]."""
        c = self._config
        qkv = layer.qkv(self._norm(x, layer.attn_norm).to(self._dtype))  # [T, (H + 2 K) D]
        qk = qkv[:, : self._rotated].view(len(x), -1, c.head_dim)  # [T, H + K, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = qk[:, : c.num_heads], qk[:, c.num_heads :]
            qk = torch.cat([self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)], 1)
        qk = _rotate(qk, rotation).to(self._dtype)
        kv = torch.cat([qk[:, c.num_heads :].flatten(1), qkv[:, self._rotated :]], 1)
        return qk[:, : c.num_heads], kv

    def _after(self, layer: Layer, x: Tensor, answered: Tensor) -> Tensor:
        x = x + self._added(layer.out(answered), layer.attn_post_norm)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm).to(self._dtype)).chunk(2, -1)
        return x + self._added(layer.down(self._weights.activation(gate) * up), layer.mlp_post_norm)

    def _added(self, y: Tensor, post_norm: Tensor | None) -> Tensor:
        return y if post_norm is None else self._norm(y, post_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), weight.shape, weight, self._config.rms_eps)

    def _padded(self, x: Tensor) -> Tensor:
        missing = -len(x) % TILE if self._deterministic else 0
        return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x

    def _by_tile(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Apply a function of [T, ...] tensors to all of them at once, or tile by tile."""
        if not self._deterministic:
            return function(*inputs)
        done = [function(*tile) for tile in _tiles(inputs)]
        return done[0] if len(done) == 1 else tuple(torch.cat(parts) for parts in zip(*done, strict=True))


def _tiles(inputs: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(x, TILE) for x in inputs), strict=True)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn channel pairs of [T, heads, D] by unit complex numbers [T, 1, D / 2], in float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)
