"""What is wrong with a model is said in one sentence, before it answers anything."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slotline.config import EngineConfig
from slotline.errors import CheckpointError, SlotlineError
from slotline.plugins.torch_backend.backend import TorchBackend


def load(model):
    backend = TorchBackend()
    try:
        backend.load(EngineConfig.of(max_slots=2, kv_cache_tokens=256, device="cpu"), model)
    finally:
        backend.close()


def change(folder, name, edit):
    file = folder / "model.safetensors"
    state = load_file(file)
    edit(state[name])
    save_file(state, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers(tiny_llama, open_model, value, dtype, name):
    tiny = tiny_llama()
    tiny.model.to(dtype).save_pretrained(tiny.folder)
    change(tiny.folder, name, lambda tensor: tensor.view(-1)[3:5].fill_(value))
    with pytest.raises(CheckpointError) as caught:
        load(open_model(tiny.folder))
    assert caught.value.message.startswith(
        f"model.safetensors: tensor {name} holds 2 values that are NaN or infinite; "
    )


def test_large_weights_are_numbers(tiny_llama, open_checkpoint):
    """Their sum overflows; they do not."""
    tiny = tiny_llama()
    change(tiny.folder, "model.norm.weight", lambda tensor: tensor.fill_(3e38))
    assert open_checkpoint(tiny.folder).tensor("final_norm").isfinite().all()


def test_nan_in_gguf(tiny_llama, write_gguf, open_model):
    tiny = tiny_llama()
    with torch.no_grad():
        tiny.model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf: tensor blk\.0\.ffn_down\.weight holds 1 values that are NaN"
    ):
        load(open_model(write_gguf(tiny.model)))


# Vocabularies


def add_token(folder, edit_json, number):
    entry = {str(number): {"content": "<image>", "special": True}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=entry)


def test_tokens_that_only_a_sibling_has(tiny_llama, open_model, edit_json):
    """Gemma's text models come with the tokenizer of those that see images, which has a token more."""
    folder = tiny_llama().folder
    plain = open_model(folder)
    add_token(folder, edit_json, 300)
    model = open_model(folder)
    assert model.vocab_size == model.tokenizer.vocab_size == 300
    assert model.tokenizer.encode("a<image>b") == plain.tokenizer.encode("a<image>b")


@pytest.mark.parametrize("rows", [200, 299])
def test_a_vocabulary_that_is_too_large(tiny_llama, open_model, edit_json, rows):
    folder = tiny_llama(vocab_size=rows).folder
    with pytest.raises(CheckpointError, match=f"the tokenizer has 300 ids but the model only {rows}"):
        open_model(folder)


@pytest.mark.parametrize("rows", [290, 310])
def test_a_config_with_another_vocabulary(tiny_llama, open_model, edit_json, rows):
    folder = tiny_llama().folder
    edit_json(folder / "config.json", vocab_size=rows)
    with pytest.raises(CheckpointError, match=rf"embed_tokens\.weight has shape \[300, 32\].*asks for \[{rows}, 32\]"):
        open_model(folder)


# Fused and split tensors


def test_a_fused_tensor_of_another_size(tmp_path, open_checkpoint):
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Phi3Config(**sizes, vocab_size=50, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).shape("layers.0.k") == (16, 32)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_key_value_heads": 4}))
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has shape \[64, 32\].*asks for \[96, 32\]"):
        open_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.self_attn.qkv_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; allowed: sliding_attention or full"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "allowed: sliding_attention or full_attention"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rope_scaling": "yarn", "rope_parameters": None}, "rope_scaling is 'yarn'; allowed: a table, or null"),
        ({"partial_rotary_factor": 0.375, "rope_parameters": None}, "head_dim is 8, of which 3 rotate"),
    ],
)
def test_configs_that_ask_for_what_is_not_there(tiny_llama, open_checkpoint, edit_json, changes, words):
    folder = tiny_llama().folder
    edit_json(folder / "config.json", architectures=["MistralForCausalLM"], **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert words in caught.value.message


def test_every_message_is_one_line(tiny_llama, open_model):
    """Whatever byte of a folder's files is changed, what comes is a model or one sentence."""
    folder = tiny_llama().folder
    rng = np.random.default_rng(0)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        for _ in range(12):
            at = int(rng.integers(0, min(len(data), 3000)))
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
            try:
                open_model(folder)
            except SlotlineError as error:
                assert "\n" not in error.message and len(error.message) < 600, error.message
        (folder / name).write_bytes(data)
