"""Read a decoder description from GGUF metadata, as converters write it for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import TensorStore
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.hf_config import checked
from slotline.plugins.models.rope import RopeScaling, yarn_attention_factor


def decoder_from_gguf(fields: Fields, store: TensorStore, architecture: str, **given: Any) -> DecoderConfig:
    """Return the description in GGUF metadata; biases and the tied head follow from which tensors there are.

    Args:
        given: fields of `DecoderConfig` that are known, instead of what the keys say.

    Raises:
        CheckpointError: a value is missing, out of range, or asks for something that is not supported.
    """
    if fields.integer("expert_count", 0, low=0):
        raise CheckpointError(f"{fields.where} is a mixture of experts, which is not supported; take a dense model")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    rotary = fields.integer("rope.dimension_count", head_dim)
    has, embed = store.tensors.__contains__, store.tensors.get("token_embd.weight")
    read: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size", embed.shape[0] if embed else 1),
        "context_length": fields.integer("context_length"),
        "rms_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": gguf_rope_scaling(fields, store),
        "rotary_dim": None if rotary == head_dim else rotary,
        "tie_embeddings": not has("output.weight"),
        "attention_bias": has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        "output_bias": has("blk.0.attn_output.bias"),
        "mlp_bias": has("blk.0.ffn_up.bias"),
    }
    return checked(DecoderConfig(architecture=architecture, **{**read, **given}), fields.where)


def gguf_rope_scaling(fields: Fields, store: TensorStore) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies.

    Raises:
        CheckpointError: its type is unknown.
    """
    if "rope_freqs.weight" in store.tensors:  # how converted Llama 3.1 files carry their scaling
        return RopeScaling(kind="factors", factors=tuple(store.read("rope_freqs.weight").flatten().tolist()))
    longrope = any(name.startswith("rope_factors_") for name in store.tensors)
    kind = "longrope" if longrope else fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("rope.scaling.factor", low=1.0))
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor", low=1.0)
        sharper = fields.number("rope.scaling.attn_factor", 1.0)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context_length=fields.integer("rope.scaling.original_context_length"),
            attention_factor=sharper * yarn_attention_factor(factor),
        )
    advice = "; take a variant of the model with a shorter context" if kind == "longrope" else ""
    raise CheckpointError(
        f"{fields.where}: {fields.prefix}rope.scaling.type {kind!r} is not supported; known: none, linear, yarn{advice}"
    )


def gguf_windows(fields: Fields, layers: int, period: int) -> Mapping[str, Any]:
    """Return ``sliding_window`` and ``global_layers``, where every ``period``-th layer sees everything."""
    window = fields.integer("attention.sliding_window", None)
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list) and len(pattern) == layers:
        everything = frozenset(i for i, windowed in enumerate(pattern) if not windowed)
    elif type(pattern) is int and pattern >= 0:
        everything = frozenset(i for i in range(layers) if pattern and (i + 1) % pattern == 0)
    else:
        raise CheckpointError(f"{fields.where}: attention.sliding_window_pattern is {pattern!r:.80}; not understood")
    if window is None or len(everything) == layers:
        return {"sliding_window": None}
    return {"sliding_window": window, "global_layers": everything}
