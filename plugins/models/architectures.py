"""Architectures: how a checkpoint's config and tensor names map to a decoder description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import TensorNames, TensorStore
from slotline.plugins.models.decoder import DecoderConfig, RopeScaling
from slotline.plugins.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of checkpoints.

    Attributes:
        name: slotline's name for it.
        hf_names: entries of config.json's ``architectures`` that mean this one.
        gguf_names: values of ``general.architecture`` that mean this one.
        parse_hf: config.json to a description.
        parse_gguf: metadata (keys under the architecture's name) and tensors to a description.
        hf_tensors: names in Hugging Face checkpoints.
        gguf_tensors: names in GGUF files.
    """

    name: str
    hf_names: tuple[str, ...]
    gguf_names: tuple[str, ...]
    parse_hf: Callable[[Fields], DecoderConfig]
    parse_gguf: Callable[[Fields, TensorStore], DecoderConfig]
    hf_tensors: TensorNames
    gguf_tensors: TensorNames


def find_architecture(registered: Mapping[str, Architecture], name: object, *, kind: str, where: str) -> Architecture:
    """Return the architecture that a file names.

    Args:
        kind: "hf" or "gguf", whose names are compared.

    Raises:
        CheckpointError: naming the unknown architecture and the known ones.
    """
    known: dict[str, Architecture] = {}
    for arch in registered.values():
        known.update(dict.fromkeys(arch.hf_names if kind == "hf" else arch.gguf_names, arch))
    if isinstance(name, str) and name in known:
        return known[name]
    raise CheckpointError(
        f"{where}: architecture {name!r} is not supported; known: {', '.join(sorted(known)) or 'none'}"
    )


_MAX_LAYERS = 4096  # a damaged number would keep us busy naming tensors
_SCALING_TYPES = "linear, llama3"


def _hf_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; newer configs keep both in rope_parameters, older ones apart."""
    table = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(table, dict):
        raise CheckpointError(f"{fields.where}: rope_scaling is {table!r:.80}; allowed: a table, or null")
    rope = Fields(table, f"{fields.where}, rope_scaling")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor", low=1.0))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.number("factor", low=1.0),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_length=rope.integer("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise CheckpointError(f"{rope.where}: low_freq_factor must be below high_freq_factor")
        return theta, scaling
    raise CheckpointError(f"{rope.where}: type {kind!r} is not supported; known: {_SCALING_TYPES}")


def _llama_from_hf(fields: Fields) -> DecoderConfig:
    if fields.get("quantization_config"):
        raise CheckpointError(
            f"{fields.where} describes quantized weights, which are not supported in this format; "
            "take the unquantized model or a GGUF file"
        )
    act = fields.text("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError(f"{fields.where}: hidden_act is {act!r}; allowed for Llama: silu")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, scaling = _hf_rope(fields)
    context = fields.integer("max_position_embeddings", 2048)
    if scaling is not None and scaling.kind == "linear":
        context = int(context * scaling.factor)  # the field keeps the length before stretching
    config = DecoderConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        vocab_size=fields.integer("vocab_size"),
        context_length=context,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return checked(config, fields.where)


def _gguf_rope_scaling(fields: Fields, store: TensorStore) -> RopeScaling | None:
    if "rope_freqs.weight" in store.tensors:  # how converted Llama 3.1 files carry their scaling
        return RopeScaling(kind="factors", factors=tuple(store.read("rope_freqs.weight").flatten().tolist()))
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("rope.scaling.factor", low=1.0))
    raise CheckpointError(
        f"{fields.where}: {fields.prefix}rope.scaling.type {kind!r} is not supported; known: none, linear"
    )


def _llama_from_gguf(fields: Fields, store: TensorStore) -> DecoderConfig:
    if fields.integer("expert_count", 0, low=0):
        raise CheckpointError(f"{fields.where} is a mixture of experts, which is not supported; take a dense model")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{fields.where} rotates only a part of each head, which is not supported for Llama")
    embed = store.tensors.get("token_embd.weight")
    biased = "blk.0.attn_q.bias" in store.tensors
    config = DecoderConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", embed.shape[0] if embed else 1),
        context_length=fields.integer("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(fields, store),
        tie_embeddings="output.weight" not in store.tensors,
        attention_bias=biased,
        mlp_bias="blk.0.ffn_up.bias" in store.tensors,
    )
    return checked(config, fields.where)


def checked(config: DecoderConfig, where: str) -> DecoderConfig:
    """Return ``config`` if its numbers fit together.

    Raises:
        CheckpointError: naming the two that do not.
    """
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads"
        )
    if config.num_layers > _MAX_LAYERS:
        raise CheckpointError(
            f"{where}: {config.num_layers} layers are not plausible; the file is damaged, fetch it again"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {config.head_dim}; rotary embeddings need an even number")
    if config.rope_theta <= 0:
        raise CheckpointError(f"{where}: rope_theta is {config.rope_theta:g}; it must be above 0")
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != config.head_dim // 2:
        raise CheckpointError(f"{where}: {len(scaling.factors)} rotary factors do not fit head_dim {config.head_dim}")
    return config


def _with_biases(names: Mapping[str, str], *biased: str) -> dict[str, Any]:
    both = dict(names)
    for part in biased:
        weight = names["layers.{i}." + part]
        both[f"layers.{{i}}.{part}_bias"] = weight.removesuffix("weight") + "bias"
    return both


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")

LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM",),
    gguf_names=("llama",),
    parse_hf=_llama_from_hf,
    parse_gguf=_llama_from_gguf,
    hf_tensors=TensorNames(
        names=_with_biases(
            {
                "embed": "model.embed_tokens.weight",
                "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
                "layers.{i}.q": "model.layers.{i}.self_attn.q_proj.weight",
                "layers.{i}.k": "model.layers.{i}.self_attn.k_proj.weight",
                "layers.{i}.v": "model.layers.{i}.self_attn.v_proj.weight",
                "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
                "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
                "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
                "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
                "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
                "final_norm": "model.norm.weight",
                "lm_head": "lm_head.weight",
            },
            *_LINEARS,
        ),
        ignored=(r".*rotary_emb\.inv_freq",),  # old checkpoints store what the config says anyway
    ),
    gguf_tensors=TensorNames(
        names=_with_biases(
            {
                "embed": "token_embd.weight",
                "layers.{i}.attn_norm": "blk.{i}.attn_norm.weight",
                "layers.{i}.q": "blk.{i}.attn_q.weight",
                "layers.{i}.k": "blk.{i}.attn_k.weight",
                "layers.{i}.v": "blk.{i}.attn_v.weight",
                "layers.{i}.o": "blk.{i}.attn_output.weight",
                "layers.{i}.mlp_norm": "blk.{i}.ffn_norm.weight",
                "layers.{i}.gate": "blk.{i}.ffn_gate.weight",
                "layers.{i}.up": "blk.{i}.ffn_up.weight",
                "layers.{i}.down": "blk.{i}.ffn_down.weight",
                "final_norm": "output_norm.weight",
                "lm_head": "output.weight",
            },
            *_LINEARS,
        ),
        ignored=(r"rope_freqs\.weight", r"blk\.\d+\.attn_rot_embd"),  # the first is read with the config
        interleaved=frozenset({"q", "k"}),
    ),
)
