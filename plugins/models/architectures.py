"""The architectures that slotline knows: what sets each apart from Llama."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slotline.plugins.models import names
from slotline.plugins.models.architecture import Architecture
from slotline.plugins.models.checkpoint import TensorStore
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.gguf_config import decoder_from_gguf, gguf_windows
from slotline.plugins.models.hf_config import decoder_from_hf, rope_of, rope_scaling, windows_of

_GELU = "gelu_pytorch_tanh"


def _windowed(fields: Fields, architecture: str) -> DecoderConfig:
    """Every layer has the window that the config gives."""
    return decoder_from_hf(fields, architecture, **windows_of(fields, lambda layer: True))


def _qwen(fields: Fields, architecture: str) -> DecoderConfig:
    windows: dict[str, object] = {}
    if fields.flag("use_sliding_window", False):
        first = fields.integer("max_window_layers", 28, low=0)
        windows = windows_of(fields, lambda layer: layer >= first)
    own = {"attention_bias": True, "output_bias": False} if architecture == "qwen2" else {"qk_norm": True}
    return decoder_from_hf(fields, architecture, **own, **windows)


def _internlm(fields: Fields) -> DecoderConfig:
    """InternLM 1: Llama with biases around attention, and its own key for the rotation."""
    biased = fields.flag("bias", True)
    rotary = fields.get("rotary")
    if not isinstance(rotary, dict):
        return decoder_from_hf(fields, "internlm", attention_bias=biased, output_bias=biased)
    kind = {"origin": "default"}.get(str(rotary.get("type")), rotary.get("type"))
    context = fields.integer("max_position_embeddings", 2048)
    table = {"type": kind, "factor": rotary.get("scaling_factor", 1.0), "rope_theta": rotary.get("base", 10000.0)}
    own = Fields({**fields.values, "rope_scaling": table, "max_position_embeddings": context}, fields.where)
    return decoder_from_hf(own, "internlm", attention_bias=biased, output_bias=biased)


def _internlm2(fields: Fields) -> DecoderConfig:
    biased = fields.flag("bias", False)
    return decoder_from_hf(fields, "internlm2", attention_bias=biased, output_bias=biased)


def _gemma(fields: Fields, architecture: str) -> DecoderConfig:
    """Gemma 2 and 3: norms around, scaled embeddings, windows in some layers, capped scores or normalised heads."""
    third = architecture == "gemma3"
    period = fields.integer("sliding_window_pattern", 6) if third else 2
    context = fields.integer("max_position_embeddings", 8192)
    windows = windows_of(fields, lambda layer: (layer + 1) % period != 0)
    own: dict[str, object] = {
        "context_length": context,  # it is given after stretching
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "hidden_act": fields.text("hidden_activation", _GELU),
        "post_norms": True,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "query_scale": fields.number("query_pre_attn_scalar", 256.0, low=1e-3) ** -0.5,
        "logit_softcap": fields.number("final_logit_softcapping", None),
        "head_dim": fields.integer("head_dim", 256),
    }
    if third:
        own |= _gemma3_ropes(fields, context) | {"qk_norm": True}
    else:
        own["attention_softcap"] = fields.number("attn_logit_softcapping", None)
    return decoder_from_hf(fields, architecture, **own, **windows)


def _gemma3_ropes(fields: Fields, context: int) -> dict[str, object]:
    """Read two rotations: newer configs have a table for each kind of layer, older ones keys of their own."""
    table = fields.get("rope_parameters")
    if isinstance(table, dict) and "full_attention" in table:
        theta, scaling = rope_of(fields, context, "full_attention")
        local, local_scaling = rope_of(fields, context, "sliding_attention")
    else:
        older = Fields(fields.get("rope_scaling", {}), f"{fields.where}, rope_scaling")
        theta, scaling = fields.number("rope_theta", 1_000_000.0), rope_scaling(older, fields, context)
        local, local_scaling = fields.number("rope_local_base_freq", 10_000.0), None
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local,
        "local_rope_scaling": local_scaling,
    }


def _from_gguf(architecture: str) -> Callable[[Fields, TensorStore], DecoderConfig]:
    def parse(fields: Fields, store: TensorStore) -> DecoderConfig:
        window = fields.integer("attention.sliding_window", None)
        return decoder_from_gguf(fields, store, architecture, sliding_window=window)

    return parse


def _qwen3_from_gguf(fields: Fields, store: TensorStore) -> DecoderConfig:
    return decoder_from_gguf(fields, store, "qwen3", qk_norm=True)


def _gemma_from_gguf(fields: Fields, store: TensorStore, architecture: str) -> DecoderConfig:
    hidden, layers = fields.integer("embedding_length"), fields.integer("block_count")
    third = architecture == "gemma3"
    largest = 62 if third else 46  # the 27B models divide by another number than head_dim; the files do not say
    head_dim = fields.integer("attention.key_length", 256)
    scalar = hidden / fields.integer("attention.head_count") if layers == largest else head_dim
    own: dict[str, object] = {
        "hidden_act": _GELU,
        "post_norms": True,
        "embedding_scale": hidden**0.5,
        "query_scale": scalar**-0.5,
        "head_dim": head_dim,
        "rotary_dim": None,
        "logit_softcap": fields.number("final_logit_softcapping", None),
    }
    if third:
        own |= {"qk_norm": True, "local_rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
        own["rope_theta"] = fields.number("rope.freq_base", 1_000_000.0)
    else:
        own["attention_softcap"] = fields.number("attn_logit_softcapping", None)
    windows = gguf_windows(fields, layers, 6 if third else 2)
    return decoder_from_gguf(fields, store, architecture, **own, **windows)


def _like_llama(name: str, hf_name: str, parse: Callable[[Fields], DecoderConfig], **more: object) -> Architecture:
    """Return an architecture with Llama's tensor names."""
    given = {
        "hf_types": (name,),
        "hf_tensors": names.HF_NAMES,
        "gguf_names": (name,),
        "parse_gguf": _from_gguf(name),
        "gguf_tensors": names.GGUF_NAMES,
    }
    return Architecture(name=name, hf_names=(hf_name,), parse_hf=parse, **{**given, **more})  # type: ignore[arg-type]


LLAMA = _like_llama(
    "llama",
    "LlamaForCausalLM",
    lambda fields: decoder_from_hf(fields, "llama"),
    gguf_tensors=names.GGUF_PAIRED_NAMES,
)
MISTRAL = _like_llama(
    "mistral", "MistralForCausalLM", partial(_windowed, architecture="mistral"), gguf_tensors=names.GGUF_PAIRED_NAMES
)
QWEN2 = _like_llama("qwen2", "Qwen2ForCausalLM", partial(_qwen, architecture="qwen2"))
QWEN3 = _like_llama("qwen3", "Qwen3ForCausalLM", partial(_qwen, architecture="qwen3"), parse_gguf=_qwen3_from_gguf)
INTERNLM = _like_llama("internlm", "InternLMForCausalLM", _internlm, gguf_names=(), parse_gguf=None, gguf_tensors=None)
INTERNLM2 = _like_llama(
    "internlm2",
    "InternLM2ForCausalLM",
    _internlm2,
    hf_tensors=names.INTERNLM2_NAMES,
    gguf_tensors=names.GGUF_PAIRED_NAMES,
)
GEMMA2 = _like_llama(
    "gemma2",
    "Gemma2ForCausalLM",
    partial(_gemma, architecture="gemma2"),
    hf_tensors=names.HF_GEMMA_NAMES,
    parse_gguf=partial(_gemma_from_gguf, architecture="gemma2"),
)
GEMMA3 = _like_llama(
    "gemma3",
    "Gemma3ForCausalLM",
    partial(_gemma, architecture="gemma3"),
    hf_types=("gemma3_text",),
    hf_tensors=names.HF_GEMMA_NAMES,
    parse_gguf=partial(_gemma_from_gguf, architecture="gemma3"),
)
PHI3 = _like_llama(
    "phi3",
    "Phi3ForCausalLM",
    partial(_windowed, architecture="phi3"),
    hf_tensors=names.HF_PHI3_NAMES,
    gguf_tensors=names.GGUF_PHI3_NAMES,
)

BUILT_IN = (LLAMA, MISTRAL, QWEN2, QWEN3, INTERNLM, INTERNLM2, GEMMA2, GEMMA3, PHI3)
