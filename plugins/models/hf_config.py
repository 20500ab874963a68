"""Read a decoder description from config.json, as most architectures write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slotline.errors import CheckpointError
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.rope import RopeScaling, yarn_attention_factor

MAX_LAYERS = 4096  # a damaged number would keep us busy naming tensors
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
}
_LAYER_TYPES = {"sliding_attention": True, "full_attention": False}


def decoder_from_hf(fields: Fields, architecture: str, **given: Any) -> DecoderConfig:
    """Return the description in a config.json with the usual keys; windows have keys of each architecture's own.

    Args:
        given: fields of `DecoderConfig` that are known, instead of what the keys say.

    Raises:
        CheckpointError: a value is missing, out of range, or asks for something that is not supported.
    """
    refuse_quantized(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1))
    context = fields.integer("max_position_embeddings", 2048)
    theta, scaling = rope_of(fields, context)
    read: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "context_length": stretched(context, scaling),
        "rms_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": _rotary_dim(fields, head_dim),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        **dict.fromkeys(("attention_bias", "output_bias"), fields.flag("attention_bias", False)),
        "mlp_bias": fields.flag("mlp_bias", False),
        "hidden_act": _activation(fields),
    }
    return checked(DecoderConfig(architecture=architecture, **{**read, **given}), fields.where)


def refuse_quantized(fields: Fields) -> None:
    """Refuse weights that a quantizer packed in a way of its own.

    Raises:
        CheckpointError: saying what to take instead.
    """
    if fields.get("quantization_config"):
        raise CheckpointError(
            f"{fields.where} describes quantized weights, which are not supported in this format; "
            "take the unquantized model or a GGUF file"
        )


def windows_of(fields: Fields, windowed: Callable[[int], bool]) -> dict[str, Any]:
    """Return ``sliding_window`` and ``global_layers``.

    Args:
        windowed: whether a layer has the window, where the file has no ``layer_types``.

    Raises:
        CheckpointError: the file names a kind of layer that is not supported.
    """
    window = fields.integer("sliding_window", None)
    count = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= set(_LAYER_TYPES):
            raise CheckpointError(
                f"{fields.where}: layer_types is {types!r:.120}; allowed: {' or '.join(_LAYER_TYPES)} for each layer"
            )
        local = [_LAYER_TYPES[kind] for kind in types]
    else:
        local = [windowed(i) for i in range(count)]
    if window is None or not any(local):
        return {"sliding_window": None}
    return {
        "sliding_window": window,
        "global_layers": frozenset(i for i, has_window in enumerate(local) if not has_window),
    }


def rope_of(fields: Fields, context: int, layer_type: str = "") -> tuple[float, RopeScaling | None]:
    """Return theta and scaling; newer configs keep both in rope_parameters, older ones apart.

    Args:
        context: the config's max_position_embeddings.
        layer_type: read the table of this kind of layer, where there is one for each.
    """
    table = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if isinstance(table, dict) and isinstance(table.get(layer_type), dict):
        table = table[layer_type]
    if not isinstance(table, dict):
        raise CheckpointError(f"{fields.where}: rope_scaling is {table!r:.80}; allowed: a table, or null")
    rope = Fields(table, f"{fields.where}, rope_scaling")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    return theta, rope_scaling(rope, fields, context)


def rope_scaling(rope: Fields, fields: Fields, context: int) -> RopeScaling | None:
    """Return the scaling that a table with rope_type (or type) describes.

    Raises:
        CheckpointError: a number is missing, or the type is unknown.
    """
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = rope.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", context)
    )
    if kind in ("default", "mrope"):  # the second turns text as the first does
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor", low=1.0))
    if kind == "dynamic":
        return RopeScaling(kind="dynamic", factor=rope.number("factor", 1.0, low=1.0), original_context_length=context)
    if kind == "llama3":
        return _llama3(rope, original)
    if kind == "yarn":
        return _yarn(rope, original, context)
    advice = "; take a variant of the model with a shorter context" if kind in ("longrope", "su") else ""
    raise CheckpointError(
        f"{rope.where}: type {kind!r} is not supported; known: default, dynamic, linear, llama3, yarn{advice}"
    )


def stretched(context: int, scaling: RopeScaling | None) -> int:
    """Return the longest sequence; with some scalings max_position_embeddings keeps the length before stretching."""
    if scaling is None or scaling.kind in ("llama3", "factors"):
        return context
    original = scaling.original_context_length if scaling.kind == "yarn" else context
    return max(context, int(original * scaling.factor))


def checked(config: DecoderConfig, where: str) -> DecoderConfig:
    """Return ``config`` if its numbers fit together.

    Raises:
        CheckpointError: naming the two that do not.
    """
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads"
        )
    if config.num_layers > MAX_LAYERS:
        raise CheckpointError(
            f"{where}: {config.num_layers} layers are not plausible; the file is damaged, fetch it again"
        )
    dim = config.rotary_dim or config.head_dim
    if config.head_dim % 2 or dim % 2 or dim > config.head_dim:
        raise CheckpointError(
            f"{where}: head_dim is {config.head_dim}, of which {dim} rotate; rotary embeddings need even numbers"
        )
    if config.rope_theta <= 0 or (config.local_rope_theta or 1.0) <= 0:
        raise CheckpointError(f"{where}: rope_theta is {config.rope_theta:g}; it must be above 0")
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors" and len(scaling.factors) != dim // 2:
        raise CheckpointError(f"{where}: {len(scaling.factors)} rotary factors do not fit head_dim {config.head_dim}")
    if scaling is not None and scaling.kind == "dynamic" and dim < 4:
        raise CheckpointError(f"{where}: dynamic scaling needs at least 4 rotary channels, here are {dim}")
    return config


def _rotary_dim(fields: Fields, head_dim: int) -> int | None:
    table = fields.get("rope_parameters", {})
    inner = table.get("partial_rotary_factor") if isinstance(table, dict) else None
    share = fields.number("partial_rotary_factor", 1.0) if inner is None else float(inner)
    return None if share == 1.0 else int(head_dim * share)


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_activation", fields.text("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{fields.where}: hidden_act is {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _llama3(rope: Fields, original: int) -> RopeScaling:
    scaling = RopeScaling(
        kind="llama3",
        factor=rope.number("factor", low=1.0),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context_length=original,
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise CheckpointError(f"{rope.where}: low_freq_factor must be below high_freq_factor")
    return scaling


def _yarn(rope: Fields, original: int, context: int) -> RopeScaling:
    factor = rope.number("factor", max(context / original, 1.0), low=1.0)
    scale, scale_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    attention = yarn_attention_factor(factor)
    if scale and scale_all:
        attention = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention),
        truncate=rope.flag("truncate", True),
    )
