"""The forward pass on kernels: eager for prompts, one CUDA graph a batch size for rows that decode."""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slotline.kernels.gate import gate
from slotline.kernels.rms_norm import rms_norm
from slotline.kernels.rotate_and_store import rotate_and_store
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.attention import AttentionPlanner, Decoding, StepAttention
from slotline.plugins.triton_backend.weights import Layer, Weights


class Decoder:
    """A transformer over the rows and tokens of a step.

    Args:
        pool: [layers, 2, blocks, Hkv, P, D] keys and values.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, pool: Tensor, planner: AttentionPlanner) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        self._planner = planner
        self._graphs: list[DecodeGraph] = []

    def capture(self, max_rows: int, max_pages: int) -> None:
        """Record the decode step for each batch size, largest first, so that they share memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(graph_sizes(max_rows)):
            self._graphs.insert(0, DecodeGraph(self, size, max_pages, self._planner, pool))

    def hidden(
        self, pool: Tensor, token_ids: Tensor, positions: Tensor, lengths: Tensor | None, attention: StepAttention
    ) -> Tensor:
        """Return [T, C] the last layer's output, normalised.

        Args:
            token_ids, positions: [T].
            lengths: not used: no model that this backend loads needs them.
        """
        rows = len(token_ids)
        if attention.decoding is not None and self._graphs and rows <= self._graphs[-1].size:
            at = bisect.bisect_left([graph.size for graph in self._graphs], rows)
            return self._graphs[at](token_ids, positions, attention)
        return self.forward(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, V] in float32 for hidden states [T, C]."""
        head = self._weights.head
        if hidden.dtype is torch.float32 or not hidden.is_cuda:
            logits = functional.linear(hidden, head).float()
        else:
            logits = torch.mm(hidden, head.t(), out_dtype=torch.float32)
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Return [T, C]; every launch is fixed by the number of tokens, so that it can be recorded."""
        w, eps = self._weights, self._config.rms_eps
        residual = functional.embedding(token_ids, w.embed)  # [T, C]
        if self._config.embedding_scale != 1.0:
            residual = residual * torch.tensor(self._config.embedding_scale, dtype=residual.dtype)
        x = rms_norm(residual, w.layers[0].attn_norm, eps)
        norms = [*(layer.attn_norm for layer in w.layers[1:]), w.final_norm]
        for layer, pages, next_norm in zip(w.layers, self._pool, norms, strict=True):
            answered = self._attend(layer, pages, x, positions, attention)
            x = rms_norm(self._post(answered, layer.attn_post_norm), layer.mlp_norm, eps, residual)
            moved = layer.down(gate(layer.gate_up(x), w.activation))
            x = rms_norm(self._post(moved, layer.mlp_post_norm), next_norm, eps, residual)
        return x

    def _attend(self, layer: Layer, pages: Tensor, x: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        angles = self._weights.angles[layer.kind]
        q = rotate_and_store(layer.qkv(x), angles, positions, attention.places, pages[0], pages[1], layer.head_norms)
        return layer.out(attention(layer.kind, q, pages[0], pages[1]).flatten(1))

    def _post(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self._config.rms_eps)


class DecodeGraph:
    """The forward pass of up to ``size`` rows with one token each, recorded once.

    Rows beyond those given have length 0: they do no attention and write to the scratch block.
    """

    def __init__(self, decoder: Decoder, size: int, max_pages: int, planner: AttentionPlanner, pool: Any) -> None:
        device = planner.device
        self.size = size
        self._ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._places = torch.zeros(size, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=device)
        self._tables = torch.zeros((size, max_pages), dtype=torch.int32, device=device)
        order = torch.arange(size, dtype=torch.int32, device=device)
        self._decoding = Decoding(self._tables, order, self._lengths)  # the recording reads it: it must live on

        def step() -> Tensor:
            attention = StepAttention(planner.shape, self._places, self._decoding, planner.capacity(size))
            return decoder.forward(self._ids, self._positions, attention)

        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
        stream.wait_stream(torch.cuda.current_stream(device))  # what the first run reads must be there
        with torch.cuda.stream(stream):  # compiles every kernel of this size before it is recorded
            step()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._out = step()

    def __call__(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Return [T, C] for T rows; the next call overwrites it."""
        decoding = attention.decoding
        assert decoding is not None
        rows = len(token_ids)
        self._ids[:rows] = token_ids
        self._positions[:rows] = positions
        self._places[:rows] = attention.places
        self._places[rows:] = 0
        self._lengths[:rows] = decoding.lengths
        self._lengths[rows:] = 0
        self._tables[:rows, : decoding.tables.shape[1]] = decoding.tables
        self._graph.replay()
        return self._out[:rows]


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes that are recorded: dense where padding would cost, up to ``most`` rows."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 4097, 32)]
    return [*(s for s in sizes if s < most), most]
