"""The forward pass on kernels. Every launch is fixed by the sizes of the step's columns, so that it can be recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from slotline.kernels.norm_gemv import norm_gemv
from slotline.kernels.norm_gemv import pays as norm_pays
from slotline.kernels.rms_norm import rms_norm
from slotline.kernels.rotate_and_store import rotate_and_store
from slotline.kernels.row_layout import TABLE
from slotline.kernels.token_inputs import token_inputs
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.attention import Shape, StepAttention, Whole
from slotline.plugins.triton_backend.inputs import Columns
from slotline.plugins.triton_backend.weights import Weights


class Decoder:
    """A transformer over the tokens of a step.

    Args:
        pool: [layers, 2, blocks, Hkv, P, D] keys and values.
        state: [slots + 1, words] of the rows, see `kernels.row_layout`.
        longest: tokens of the longest sequence.

    Attributes:
        exact: what a token gives does not depend on what else is in the step, to the last bit.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, pool: Tensor, state: Tensor, longest: int) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        self.state = state
        self._longest = longest
        self.shape = Shape.of(config)
        width = weights.embed.shape[1]
        self.exact = weights.head.exact
        self._fuses = norm_pays(width) and not config.post_norms and not self.exact

    def hidden(self, columns: Columns[Tensor], lines: int, wholes: Sequence[Whole] = ()) -> Tensor:
        """Return [T, C] the last layer's output, normalised.

        Args:
            columns: of the step.
            lines: the most rows that may decode at the front.
            wholes: see `StepAttention`.
        """
        inputs = token_inputs(
            self.state,
            columns.tokens,
            columns.positions,
            columns.token_slots,
            columns.decoding,
            min(lines, len(columns.tokens)),
        )
        attention = StepAttention(
            self.shape, self.state[:, TABLE.value :], columns, inputs.lengths, self._longest, wholes
        )
        return self._layers(inputs.ids, columns.positions, inputs.places, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, V] in float32 for hidden states [T, C]."""
        logits = self._weights.head.logits(hidden)
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _layers(self, ids: Tensor, positions: Tensor, places: Tensor, attention: StepAttention) -> Tensor:
        w, eps = self._weights, self._config.rms_eps
        residual = functional.embedding(ids, w.embed)  # [T, C]
        if self._config.embedding_scale != 1.0:
            residual = residual * torch.tensor(self._config.embedding_scale, dtype=residual.dtype)
        if len(ids) == 1 and self._fuses:
            return self._one_row(residual, positions, places, attention)
        x = rms_norm(residual, w.layers[0].attn_norm, eps, dependent=True)
        norms = [*(layer.attn_norm for layer in w.layers[1:]), w.final_norm]
        for layer, pages, next_norm in zip(w.layers, self._pool, norms, strict=True):
            q = rotate_and_store(
                layer.qkv(x), w.angles[layer.kind], positions, places, pages[0], pages[1], layer.head_norms,
                alike=self.exact, dependent=True,
            )  # fmt: skip
            answered = layer.out(attention(layer.kind, q, pages[0], pages[1]).flatten(1))
            x = rms_norm(self._post(answered, layer.attn_post_norm), layer.mlp_norm, eps, residual, dependent=True)
            moved = layer.down(layer.gate_up.gated(x, w.activation))
            x = rms_norm(self._post(moved, layer.mlp_post_norm), next_norm, eps, residual, dependent=True)
        return x

    def _one_row(self, x: Tensor, positions: Tensor, places: Tensor, attention: StepAttention) -> Tensor:
        """Return [1, C] for an embedding [1, C]: products, norms and gates of one row in five launches a layer.

        Each is launched before the one in front is done and loads its first weights meanwhile.
        """
        w, eps = self._weights, self._config.rms_eps
        residual: Tensor | None = None
        for layer, pages in zip(w.layers, self._pool, strict=True):
            qkv, up = layer.qkv, layer.gate_up
            both, summed = norm_gemv(x, layer.attn_norm, eps, qkv.weight, qkv.bias, residual=residual, dependent=True)
            q = rotate_and_store(
                both, w.angles[layer.kind], positions, places, pages[0], pages[1], layer.head_norms, dependent=True
            )
            answered = layer.out(attention(layer.kind, q, pages[0], pages[1]).flatten(1))
            gated, residual = norm_gemv(
                answered, layer.mlp_norm, eps, up.weight, up.bias,
                residual=summed, activation=w.activation, dependent=True,
            )  # fmt: skip
            x = layer.down(gated)
        return rms_norm(x, w.final_norm, eps, residual, dependent=True)

    def _post(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self._config.rms_eps, dependent=True)
