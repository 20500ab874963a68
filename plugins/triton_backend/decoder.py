"""The forward pass on kernels. Every launch is fixed by the sizes of the step's columns, so that it can be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from slotline.plugins.triton_backend.weights import Linear, Weights


class Decoder:
    """A transformer over the tokens of a step.

    Args:
        pool: [layers, 2, blocks, Hkv, P, D] keys and values.
        state: [slots + 1, words] of the rows, see `kernels.row_layout`.
        longest: tokens of the longest sequence.

    Attributes:
        exact: what a token gives does not depend on what else is in the step, to the last bit.
        library: library attention may compute a prompt from its beginning on.
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
        self.library = self.shape.plain and not self.exact
        self._fuses = norm_pays(width) and not config.post_norms and not self.exact

    def hidden(self, columns: Columns[Tensor], lines: int, wholes: Sequence[Whole] = ()) -> Tensor:
        """Return [T, C] the last layer's output, normalised.

        Args:
            columns: of the step.
            lines: the most rows that may decode at the front.
            wholes: see `StepAttention`.
        """
        return self._compute(columns, lines, wholes, pick=False)

    def picked(self, columns: Columns[Tensor], lines: int, wholes: Sequence[Whole] = ()) -> Tensor:
        """Return [R, C] of that what `columns.picks` names; where these are few, the last layer computes no others."""
        few = 2 * len(columns.picks) <= len(columns.tokens)
        if few and not self.exact:
            return self._compute(columns, lines, wholes, pick=True)
        return self.hidden(columns, lines, wholes).index_select(0, columns.picks)

    def _compute(self, columns: Columns[Tensor], lines: int, wholes: Sequence[Whole], *, pick: bool) -> Tensor:
        inputs = token_inputs(
            self.state,
            columns.tokens,
            columns.positions,
            columns.token_slots,
            columns.decoding,
            min(lines, len(columns.tokens)),
        )
        tables = self.state[:, TABLE.value :]
        attention = StepAttention(
            self.shape, tables, columns, inputs.lengths, self._longest, wholes, picks=pick, exact=self.exact
        )
        return self._layers(
            inputs.ids,
            columns.positions,
            inputs.places,
            attention,
            keep=bool(wholes),
            picks=columns.picks if pick else None,
        )

    def shallow(self) -> Decoder:
        """Return the first two layers alone: what is compiled, or chosen by a library, is the same for all layers."""
        weights = replace(self._weights, layers=self._weights.layers[:2])
        return Decoder(self._config, weights, self._pool[:2], self.state, self._longest)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, V] in float32 for hidden states [T, C]."""
        logits = self._weights.head.logits(hidden)
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _layers(
        self,
        ids: Tensor,
        positions: Tensor,
        places: Tensor,
        attention: StepAttention,
        *,
        keep: bool,
        picks: Tensor | None,
    ) -> Tensor:
        w, eps = self._weights, self._config.rms_eps
        residual = functional.embedding(ids, w.embed)  # [T, C]
        if self._config.embedding_scale != 1.0:
            residual = residual * torch.tensor(self._config.embedding_scale, dtype=residual.dtype)
        if len(ids) == 1 and self._fuses:
            return self._one_row(residual, positions, places, attention)
        alone = len(ids) == 1  # with more rows, kernels that start early only stood in the way of libraries' products
        x = rms_norm(residual, w.layers[0].attn_norm, eps, dependent=alone)
        norms = [*(layer.attn_norm for layer in w.layers[1:]), w.final_norm]
        for number, (layer, (keys, values), next_norm) in enumerate(zip(w.layers, self._pool, norms, strict=True), 1):
            qkv = layer.qkv(x)
            q = rotate_and_store(
                qkv, w.angles[layer.kind], positions, places, keys, values, layer.head_norms,
                keep=keep, alike=self.exact, dependent=alone,
            )  # fmt: skip
            if picks is not None and number == len(w.layers):
                residual = residual.index_select(0, picks)
                found = attention.picked(layer.kind, q.index_select(0, picks), keys, values)
            else:
                found = attention(layer.kind, q, keys, values, qkv)
            x = self._add_and_norm(layer.out, found.flatten(1), residual, layer.attn_post_norm, layer.mlp_norm)
            gated = layer.gate_up.gated(x, w.activation)
            x = self._add_and_norm(layer.down, gated, residual, layer.mlp_post_norm, next_norm)
        return x

    def _one_row(self, x: Tensor, positions: Tensor, places: Tensor, attention: StepAttention) -> Tensor:
        """Return [1, C] for an embedding [1, C]: products, norms and gates of one row in five launches a layer.

        Each is launched before the one in front is done and loads its first weights meanwhile.
        """
        w, eps = self._weights, self._config.rms_eps
        residual: Tensor | None = None
        for layer, (keys, values) in zip(w.layers, self._pool, strict=True):
            qkv, up = layer.qkv, layer.gate_up
            both, summed = norm_gemv(x, layer.attn_norm, eps, qkv.weight, qkv.bias, residual=residual, dependent=True)
            q = rotate_and_store(
                both, w.angles[layer.kind], positions, places, keys, values, layer.head_norms, dependent=True
            )
            answered = layer.out(attention(layer.kind, q, keys, values, both).flatten(1))
            gated, residual = norm_gemv(
                answered, layer.mlp_norm, eps, up.weight, up.bias,
                residual=summed, activation=w.activation, dependent=True,
            )  # fmt: skip
            x = layer.down(gated)
        return rms_norm(x, w.final_norm, eps, residual, dependent=True)

    def _add_and_norm(self, linear: Linear, x: Tensor, residual: Tensor, post: Tensor | None, norm: Tensor) -> Tensor:
        """Add a product, normalised by ``post`` if given, to the residual [T, C]; return that normalised."""
        eps, alone = self._config.rms_eps, len(x) == 1
        if post is None and linear.adds(len(x)):
            linear.add(x, residual)
            return rms_norm(residual, norm, eps)
        product = linear.normed(x)
        if post is not None:
            product = rms_norm(product, post, eps, dependent=alone)
        return rms_norm(product, norm, eps, residual, dependent=alone)
