"""A plugin that adds an architecture: Baichuan 7B is Llama with queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Callable

from slotline.hookspecs import hookimpl
from slotline.plugins.models.architecture import Architecture
from slotline.plugins.models.checkpoint import Fused, TensorNames
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.hf_config import decoder_from_hf

NAMES = TensorNames(
    names={
        "embed": "model.embed_tokens.weight",
        "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.o": "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.gate": "model.layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.up": "model.layers.{i}.mlp.up_proj.weight",
        "layers.{i}.down": "model.layers.{i}.mlp.down_proj.weight",
        "final_norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    },
    fused=(Fused(name="model.layers.{i}.self_attn.W_pack.weight", parts=("q", "k", "v")),),
    ignored=(r".*rotary_emb\.inv_freq",),
)


def describe(fields: Fields) -> DecoderConfig:
    """Read config.json: its keys are the usual ones, and each head has keys of its own."""
    return decoder_from_hf(fields, "baichuan", num_kv_heads=fields.integer("num_attention_heads"))


BAICHUAN = Architecture(
    name="baichuan",
    hf_names=("BaiChuanForCausalLM",),
    hf_types=("baichuan",),
    parse_hf=describe,
    hf_tensors=NAMES,
)


@hookimpl
def slotline_register_architectures(register: Callable[[str, Architecture], None]) -> None:
    """Register the architecture beside the built-in ones."""
    register(BAICHUAN.name, BAICHUAN)
