"""Tensor names that several architectures share."""

from __future__ import annotations

from collections.abc import Mapping

from slotline.plugins.models.checkpoint import Fused, TensorNames

_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")

_HF = {
    "embed": "model.embed_tokens.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
    "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
    "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
    "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
    "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_HF_POST_NORMS = {
    "layers.{i}.attn_post_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_INTERNLM2 = {
    "embed": "model.tok_embeddings.weight",
    "layers.{i}.attn_norm": "model.layers.{i}.attention_norm.weight",
    "layers.{i}.o": "model.layers.{i}.attention.wo.weight",
    "layers.{i}.mlp_norm": "model.layers.{i}.ffn_norm.weight",
    "layers.{i}.gate": "model.layers.{i}.feed_forward.w1.weight",
    "layers.{i}.up": "model.layers.{i}.feed_forward.w3.weight",
    "layers.{i}.down": "model.layers.{i}.feed_forward.w2.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "output.weight",
}
_GGUF = {
    "embed": "token_embd.weight",
    "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
    "layers.{i}.q": "blk.{i}.attn_q.weight",
    "layers.{i}.k": "blk.{i}.attn_k.weight",
    "layers.{i}.v": "blk.{i}.attn_v.weight",
    "layers.{i}.o": "blk.{i}.attn_output.weight",
    "layers.{i}.q_norm": "blk.{i}.attn_q_norm.weight",
    "layers.{i}.k_norm": "blk.{i}.attn_k_norm.weight",
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm.weight",
    "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
    "layers.{i}.gate": "blk.{i}.ffn_gate.weight",
    "layers.{i}.up": "blk.{i}.ffn_up.weight",
    "layers.{i}.down": "blk.{i}.ffn_down.weight",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
# Old checkpoints store what the config says anyway.
_HF_IGNORED = (r".*rotary_emb\.inv_freq",)
# The first is read with the config.
_GGUF_IGNORED = (r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd(\.weight)?")


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Return a name map with the biases of its linear layers, which lie beside the weights."""
    both = dict(names)
    for part in _LINEARS:
        weight = names.get("layers.{i}." + part)
        if weight is not None:
            both[f"layers.{{i}}.{part}_bias"] = weight.removesuffix("weight") + "bias"
    return both


def fused(name: str, *parts: str, by_kv_head: bool = False) -> tuple[Fused, Fused]:
    """Return a fused weight and the bias beside it."""
    biases = tuple(f"{part}_bias" for part in parts)
    return (
        Fused(name=name, parts=parts, by_kv_head=by_kv_head),
        Fused(name=name.removesuffix("weight") + "bias", parts=biases, by_kv_head=by_kv_head),
    )


# As transformers names them for Llama and most of what came after it.
HF_NAMES = TensorNames(names=with_biases(_HF), ignored=_HF_IGNORED)
HF_GEMMA_NAMES = TensorNames(names=with_biases({**_HF, **_HF_POST_NORMS}), ignored=_HF_IGNORED, norms_from_one=True)
HF_PHI3_NAMES = TensorNames(
    names=with_biases(_HF),
    fused=(
        *fused("model.layers.{i}.self_attn.qkv_proj.weight", "q", "k", "v"),
        *fused("model.layers.{i}.mlp.gate_up_proj.weight", "gate", "up"),
    ),
    ignored=_HF_IGNORED,
)
INTERNLM2_NAMES = TensorNames(
    names=with_biases(_INTERNLM2),
    fused=fused("model.layers.{i}.attention.wqkv.weight", "q", "k", "v", by_kv_head=True),
    ignored=_HF_IGNORED,
)

# llama.cpp turns rotary channels in halves for most architectures, in pairs for the oldest ones, whose q and k
# converters reorder.
GGUF_NAMES = TensorNames(names=with_biases(_GGUF), ignored=_GGUF_IGNORED)
GGUF_PAIRED_NAMES = TensorNames(names=with_biases(_GGUF), ignored=_GGUF_IGNORED, interleaved=frozenset({"q", "k"}))
GGUF_PHI3_NAMES = TensorNames(
    names=with_biases(_GGUF),
    fused=(*fused("blk.{i}.attn_qkv.weight", "q", "k", "v"), *fused("blk.{i}.ffn_up.weight", "gate", "up")),
    ignored=_GGUF_IGNORED,
)
