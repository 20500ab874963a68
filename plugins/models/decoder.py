"""The decoder description: what a backend must know of a transformer, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from slotline.plugins.models.rope import Rope, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How the layers of one kind see other positions.

    Attributes:
        window: tokens each one sees, itself included; None = all before it.
    """

    window: int | None
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder-only transformer with RMS norms and gated feed-forward layers.

    Attributes:
        head_dim: width of one attention head; not always hidden_size / num_heads.
        num_kv_heads: num_heads for multi-head, 1 for multi-query, between for grouped attention.
        context_length: longest sequence the model was made for, in tokens.
        rotary_dim: channels of each head that the rotation turns, the first ones; None = all.
        tie_embeddings: the head is the embedding matrix; there is no tensor ``lm_head``.
        attention_bias: q, k and v have biases.
        output_bias: o has one.
        mlp_bias: gate, up and down have biases.
        sliding_window: tokens each one sees, or None for all.
        global_layers: layers that see everything even so.
        local_rope_theta: the base of the rotation in layers with a window, where it is another one.
        local_rope_scaling: the scaling there; used with ``local_rope_theta``.
        qk_norm: q and k are RMS-normalised per head before the rotation.
        post_norms: what attention and feed-forward layers add is normalised, too.
        embedding_scale: embeddings are multiplied by it.
        query_scale: attention scores are multiplied by it; None = head_dim ** -0.5.
        attention_softcap: scores are squeezed into (-cap, cap) by a tanh; None = not.
        logit_softcap: likewise the logits.
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
    rotary_dim: int | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    global_layers: frozenset[int] = frozenset()
    local_rope_theta: float | None = None
    local_rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    hidden_act: str = "silu"

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of layers there are, one or two; ``kind_of`` says which layer is of which."""
        dim = self.rotary_dim or self.head_dim
        rope = Rope(theta=self.rope_theta, dim=dim, scaling=self.rope_scaling)
        local = rope
        if self.local_rope_theta is not None:
            local = Rope(theta=self.local_rope_theta, dim=dim, scaling=self.local_rope_scaling)
        everything = LayerKind(window=None, rope=rope)
        if self.sliding_window is None:
            return (everything,)
        windowed = LayerKind(window=self.sliding_window, rope=local)
        return (windowed, everything) if self.global_layers else (windowed,)

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's kind in ``layer_kinds``."""
        return int(self.sliding_window is not None and layer in self.global_layers)

    @property
    def kv_values_per_token(self) -> int:
        """Return how many values of keys and values one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


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
    biased = ("q", "k", "v") * config.attention_bias + ("o",) * config.output_bias
    biased += ("gate", "up", "down") * config.mlp_bias
    shapes.update({f"{name}_bias": shapes[name][:1] for name in biased})
    if config.qk_norm:
        shapes.update(q_norm=(config.head_dim,), k_norm=(config.head_dim,))
    if config.post_norms:
        shapes.update(attn_post_norm=(hidden,), mlp_post_norm=(hidden,))
    return shapes
