"""Hugging Face folders: what is read equals what transformers wrote, and damage is named."""

import json
import os
import struct

import pytest

from slotline.errors import CheckpointError, TokenizerError
from slotline.plugins.models.decoder import expected_tensors
from slotline.plugins.models.rope import rope_inv_freq

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part = name.split(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    return f"model.layers.{layer}.{HF_NAMES[part.removesuffix('_bias')]}.{kind}"


def assert_same(checkpoint, model):
    import torch

    state = model.state_dict()
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        assert tuple(tensor.shape) == checkpoint.shape(name)
        assert torch.equal(tensor, state[hf_name(name)]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["grouped", "multi-head", "multi-query", "tied", "biases"],
)
def test_reads_what_transformers_wrote(tiny_llama, open_checkpoint, options):
    tiny = tiny_llama(**options)
    checkpoint = open_checkpoint(tiny.folder)
    assert_same(checkpoint, tiny.model)
    assert checkpoint.num_parameters == sum(p.numel() for p in tiny.model.parameters())
    assert checkpoint.weight_bytes == 4 * checkpoint.num_parameters
    assert checkpoint.dtype == "float32"
    assert ("lm_head" in checkpoint.names()) is not options.get("tie_word_embeddings", False)


def test_keeps_the_type_of_the_file(tiny_llama, open_checkpoint):
    import torch

    tiny = tiny_llama()
    tiny.model.to(torch.bfloat16).save_pretrained(tiny.folder)
    checkpoint = open_checkpoint(tiny.folder)
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.tensor("layers.1.q").dtype == torch.bfloat16
    assert_same(checkpoint, tiny.model)


def test_changing_a_tensor_leaves_the_file_alone(tiny_llama, open_checkpoint):
    tiny = tiny_llama()
    open_checkpoint(tiny.folder).tensor("embed").zero_()
    assert_same(open_checkpoint(tiny.folder), tiny.model)


def test_unknown_tensor_name(tiny_llama, open_checkpoint):
    with pytest.raises(KeyError):
        open_checkpoint(tiny_llama().folder).tensor("layers.2.q")


def test_one_file_of_a_folder_can_be_named(tiny_llama, open_checkpoint):
    tiny = tiny_llama()
    assert_same(open_checkpoint(tiny.folder / "model.safetensors"), tiny.model)


@pytest.fixture
def sharded(tiny_llama):
    tiny = tiny_llama(save={"max_shard_size": "30KB"})
    tiny.shards = sorted(tiny.folder.glob("model-*.safetensors"))
    tiny.index = tiny.folder / "model.safetensors.index.json"
    assert len(tiny.shards) > 2 and tiny.index.exists()
    return tiny


def test_reads_shards(sharded, open_checkpoint):
    assert_same(open_checkpoint(sharded.folder), sharded.model)


# The numbers of config.json


@pytest.mark.parametrize("form", ["apart", "together"])
def test_rope_scaling_is_read_in_both_forms(tiny_llama, open_checkpoint, edit_json, form):
    tiny = tiny_llama()
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if form == "apart":
        edit_json(tiny.folder / "config.json", rope_parameters=None, rope_scaling=scaling, rope_theta=5e5)
    else:
        edit_json(tiny.folder / "config.json", rope_parameters={**scaling, "rope_theta": 5e5}, rope_theta=None)
    config = open_checkpoint(tiny.folder).config
    assert (config.rope_theta, config.rope_scaling.kind, config.rope_scaling.factor) == (5e5, "llama3", 8.0)
    assert config.context_length == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_equal_transformers(tiny_llama, open_checkpoint, rope):
    import torch

    tiny = tiny_llama(rope_parameters={**rope, "rope_theta": 10000.0}, head_dim=64)
    config = open_checkpoint(tiny.folder).config
    assert torch.equal(rope_inv_freq(config.layer_kinds[0].rope), tiny.model.model.rotary_emb.inv_freq)


def test_linear_scaling_stretches_the_context(tiny_llama, open_checkpoint):
    tiny = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    assert open_checkpoint(tiny.folder).config.context_length == 4 * 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["config.json", "'MambaForCausalLM'", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": None}, ["architecture None", "LlamaForCausalLM"]),
        ({"hidden_size": "big"}, ["hidden_size is 'big'", "an integer"]),
        ({"hidden_size": None}, ["no 'hidden_size'"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"head_dim": 7}, ["head_dim is 7", "even"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps is -1"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'", "true or false"]),
        ({"hidden_act": "relu"}, ["hidden_act is 'relu'", "silu"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["'spiral'", "linear, llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'", "shorter context"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["no 'factor'"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, ["factor is 0.5"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantized", "GGUF"]),
        ({"eos_token_id": "two"}, ["eos_token_id is 'two'"]),
        ({"num_hidden_layers": 3}, ["no tensor model.layers.2.input_layernorm.weight", "fetch it again"]),
        ({"num_hidden_layers": 1}, ["model.safetensors", "model.layers.1.", "not part of architecture"]),
        ({"intermediate_size": 50}, ["gate_proj.weight has shape [48, 32]", "[50, 32]"]),
        ({"attention_bias": True}, ["no tensor model.layers.0.self_attn.q_proj.bias"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tiny_llama, open_model, edit_json, changes, words):
    folder = tiny_llama().folder
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        open_model(folder)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_head_is_not_tied_by_guess(tiny_llama, open_checkpoint, edit_json):
    folder = tiny_llama(tie_word_embeddings=True).folder
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        open_checkpoint(folder)


def test_a_tied_head_that_was_saved_too_is_ignored(tiny_llama, open_checkpoint, edit_json):
    folder = tiny_llama().folder
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head" not in open_checkpoint(folder).names()


# Damaged files


def test_missing_shard(sharded, open_checkpoint):
    sharded.shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"no file {sharded.shards[1].name}.*fetch the missing shard"):
        open_checkpoint(sharded.folder)


def test_missing_index(sharded, open_checkpoint):
    sharded.index.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(sharded.folder)


def test_tensor_in_another_shard_than_the_index_says(sharded, open_checkpoint):
    index = json.loads(sharded.index.read_text())
    first, last = sharded.shards[0].name, sharded.shards[-1].name
    name = next(n for n, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = last
    sharded.index.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{last} has no tensor {name}"):
        open_checkpoint(sharded.folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "", "..", 3])
def test_index_cannot_leave_the_folder(sharded, open_checkpoint, shard):
    sharded.index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(CheckpointError, match="a name in the same folder"):
        open_checkpoint(sharded.folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000], ids=["empty", "cut", "list", "deep"])
def test_json_that_is_none(tiny_llama, open_checkpoint, text):
    folder = tiny_llama().folder
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def safetensors_header(**tensors) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header


OVERLAPPING = safetensors_header(
    a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
) + bytes(12)


@pytest.mark.parametrize(
    "data",
    [b"", b"short", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 4) + b"nope", OVERLAPPING],
    ids=["empty", "short", "header-of-an-exabyte", "no-json", "overlap"],
)
def test_damaged_safetensors(tiny_llama, open_checkpoint, data):
    folder = tiny_llama().folder
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged.*fetch the file again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_truncated_safetensors(tiny_llama, open_checkpoint, share):
    file = tiny_llama().folder / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        open_checkpoint(file.parent)


def test_extra_tensor(tiny_llama, open_checkpoint):
    from safetensors.torch import load_file, save_file

    file = tiny_llama().folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.sinks": tensors["model.norm.weight"].clone()}, file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.sinks"):
        open_checkpoint(file.parent)


def test_stored_rotary_frequencies_are_ignored(tiny_llama, open_checkpoint):
    from safetensors.torch import load_file, save_file

    file = tiny_llama().folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"].clone()}, file)
    open_checkpoint(file.parent)


def test_no_config(tiny_llama, open_checkpoint):
    folder = tiny_llama().folder
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(folder)


def test_no_weights(tiny_llama, open_model):
    folder = tiny_llama().folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights of a known kind"):
        open_model(folder)


def test_no_tokenizer(tiny_llama, open_model):
    folder = tiny_llama().folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer; expected tokenizer\.json"):
        open_model(folder)


def test_tokenizer_of_a_larger_model(tiny_llama, open_model):
    folder = tiny_llama(vocab_size=200).folder
    with pytest.raises(CheckpointError, match="300 ids but the model only 200"):
        open_model(folder)


# Pickles


@pytest.fixture
def pickled(tiny_llama):
    import torch

    tiny = tiny_llama()
    torch.save(tiny.model.state_dict(), tiny.folder / "pytorch_model.bin")
    return tiny


def test_safetensors_come_first(pickled, open_checkpoint):
    assert "safetensors" in type(open_checkpoint(pickled.folder)._store).__name__.lower()


def test_pickles_need_the_flag(pickled, open_checkpoint):
    (pickled.folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="unless trust_pickle is set"):
        open_checkpoint(pickled.folder)
    assert_same(open_checkpoint(pickled.folder, trust_pickle=True), pickled.model)


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (self.file, "w"))


def test_a_pickle_runs_nothing(pickled, open_checkpoint, tmp_path):
    import torch

    (pickled.folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(str(tmp_path / "went-off"))}, pickled.folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="damaged or holds more than tensors"):
        open_checkpoint(pickled.folder, trust_pickle=True)
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize("data", [b"", b"not a pickle"])
def test_damaged_pickle(pickled, open_checkpoint, data):
    (pickled.folder / "model.safetensors").unlink()
    (pickled.folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
        open_checkpoint(pickled.folder, trust_pickle=True)


def test_expected_tensors_name_everything_once(tiny_llama, open_checkpoint):
    config = open_checkpoint(tiny_llama().folder).config
    assert list(expected_tensors(config))[:3] == ["embed", "layers.0.attn_norm", "layers.0.q"]
    assert len(expected_tensors(config)) == 2 * 9 + 3
