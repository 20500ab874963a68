"""Checkpoints written by transformers answer as transformers does, from safetensors and from GGUF."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

WINDOWED = {"sliding_window": 12}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, biases, tied": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", WINDOWED),
    "mistral, no window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, windows": ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 2, **WINDOWED}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3, layer types": (
        "Gemma3ForCausalLM",
        {**GEMMA, "layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 16},
    ),
    "phi3": ("Phi3ForCausalLM", {**WINDOWED, "partial_rotary_factor": 0.5}),
    "phi3, no window": ("Phi3ForCausalLM", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_safetensors(tiny, same_answers, open_checkpoint, tmp_path, case):
    kind, options = CASES[case]
    model = tiny(kind, **options)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    same_answers(checkpoint, model)
    assert checkpoint.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", ["mistral", "qwen3", "gemma2", "gemma3, layer types", "phi3"])
def test_chunks_and_deterministic_mode(tiny, same_answers, open_checkpoint, tmp_path, case):
    kind, options = CASES[case]
    model = tiny(kind, **options)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    same_answers(checkpoint, model, lengths=[70], chunks=[20, 1, 33, 16])
    same_answers(checkpoint, model, lengths=[70], chunks=[20, 1, 33, 16], deterministic=True)


def test_the_window_and_the_caps_matter(tiny, reference):
    """Else the tests above would pass without them."""
    prompt = list(range(70))
    for kind, options, without in [
        ("MistralForCausalLM", WINDOWED, {"sliding_window": None}),
        ("Qwen2ForCausalLM", CASES["qwen2, windows"][1], {"use_sliding_window": False}),
        ("Gemma2ForCausalLM", CASES["gemma2"][1], {"attn_logit_softcapping": None}),
        ("Gemma3ForCausalLM", GEMMA, {"final_logit_softcapping": None}),
        ("Gemma3ForCausalLM", GEMMA, {"sliding_window": 500}),
        ("Gemma3ForCausalLM", GEMMA, {"query_pre_attn_scalar": 8}),
    ]:
        with_it, _ = reference(tiny(kind, **options), prompt, 1)
        without_it, _ = reference(tiny(kind, **{**options, **without}), prompt, 1)
        assert (with_it - without_it).abs().max() > 0.05, f"{kind} {without}"


# InternLM, which transformers lacks, in its own names, against the Llama that computes the same.


def test_internlm(tiny, same_answers, open_checkpoint, tmp_path):
    model = tiny("LlamaForCausalLM", attention_bias=True)
    state = {**model.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(state, tmp_path / "model.safetensors")
    config = {key: model.config.to_dict()[key] for key in INTERNLM_KEYS}
    write_config(tmp_path, config, model_type="internlm", architectures=["InternLMForCausalLM"], bias=True)
    same_answers(open_checkpoint(tmp_path), model)
    write_config(tmp_path, config, model_type="internlm", bias=True)  # without `architectures`
    assert open_checkpoint(tmp_path).config.architecture == "internlm"


INTERNLM_KEYS = (
    *("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "vocab_size", "num_key_value_heads"),
)


def write_config(folder, config, **more):
    (folder / "config.json").write_text(json.dumps({**config, **more}))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_internlm2(tiny, same_answers, open_checkpoint, tmp_path, biased, kv_heads):
    model = tiny("LlamaForCausalLM", attention_bias=biased, num_key_value_heads=kv_heads, head_dim=8)
    save_file(as_internlm2(model), tmp_path / "model.safetensors")
    config = {key: model.config.to_dict()[key] for key in INTERNLM_KEYS}
    write_config(tmp_path, config, model_type="internlm2", architectures=["InternLM2ForCausalLM"], bias=biased)
    checkpoint = open_checkpoint(tmp_path)
    same_answers(checkpoint, model, lengths=[70] if kv_heads == 2 else [9])
    assert checkpoint.num_parameters == sum(p.numel() for p in model.parameters())


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}


def as_internlm2(model):
    """Rename, and join q, k and v: for each key head the queries that share it, the key, the value."""
    c, state = model.config, model.state_dict()
    fused = {}
    for layer in range(c.num_hidden_layers):
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{layer}.self_attn."
            parts = [state.pop(f"{prefix}{name}_proj.{kind}", None) for name in "qkv"]
            if parts[0] is not None:
                heads = [part.unflatten(0, (c.num_key_value_heads, -1, c.head_dim)) for part in parts]
                joined = torch.cat(heads, 1).flatten(0, 2)
                fused[f"model.layers.{layer}.attention.wqkv.{kind}"] = joined.contiguous()
    for name, tensor in state.items():
        for theirs, ours in INTERNLM2_NAMES.items():
            name = name.replace(f"{theirs}.", f"{ours}.")  # noqa: PLW2901
        fused[name] = tensor.contiguous()
    return fused


# GGUF, with names from the gguf package and the layout of llama.cpp's converter.

GGUF_CASES = {
    "llama": ("llama", "llama"),
    "llama, biases, tied": ("llama", "llama"),
    "qwen2": ("qwen2", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
    "gemma2": ("gemma2", "gemma2"),
    "gemma3": ("gemma3", "gemma3"),
    "phi3": ("phi3", "phi3"),
    "phi3, no window": ("phi3", "phi3"),
    "mistral, no window": ("llama", "llama"),  # converters write Mistral as Llama
    "mistral": ("llama", "llama"),
    "internlm2": ("internlm2", "internlm2"),
}
# Where transformers' own reader knows the architecture and all that these configs ask for.
READ_BY_TRANSFORMERS = {"llama", "qwen2", "phi3, no window", "mistral, no window"}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf(tiny, reference, same_answers, open_checkpoint, tmp_path, case):
    kind, options = CASES.get(case, CASES["llama"])
    if kind.startswith("Gemma"):
        options = {**options, "query_pre_attn_scalar": 8}  # head_dim: the file cannot say anything else
    if kind == "Gemma3ForCausalLM":
        options = {**options, "num_hidden_layers": 7}  # one layer of six sees everything
    model = tiny(kind, **options)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, *GGUF_CASES[case])
    same_answers(open_checkpoint(path), model)
    if case in READ_BY_TRANSFORMERS:
        theirs = type(model).from_pretrained(tmp_path, gguf_file="tiny.gguf")
        prompt = list(range(40))
        torch.testing.assert_close(reference(theirs, prompt, 1)[0], reference(model, prompt, 1)[0], atol=1e-4, rtol=0)


def write_gguf(path, model, name, arch):
    """Write a transformers model as llama.cpp's converter does."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    c = model.config
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    writer = GGUFWriter(path, name)
    write_metadata(writer, c, name)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if name in ("llama", "internlm2") and ("q_proj" in hf_name or "k_proj" in hf_name):
            array = paired(array, c.num_attention_heads if "q_proj" in hf_name else c.num_key_value_heads)
        if name.startswith("gemma") and "norm" in hf_name:
            array = array + 1
        writer.add_tensor(names.get_name(hf_name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer, c, name):
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    for add in (writer.add_pad_token_id, writer.add_bos_token_id, writer.add_eos_token_id):
        add(0)  # transformers' own defaults lie outside a tiny vocabulary
    ropes = c.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if name in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    if name == "phi3":
        writer.add_rope_dimension_count(int(c.head_dim * ropes.get("partial_rotary_factor", 1.0)))
    if getattr(c, "sliding_window", None) and "qwen" not in name:
        writer.add_sliding_window(c.sliding_window)
    for cap, add in (
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
    ):
        if getattr(c, cap, None) is not None:
            add(getattr(c, cap))


def paired(array, heads):
    """Put rotary channels side by side."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
