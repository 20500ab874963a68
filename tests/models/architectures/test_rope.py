"""Rotary embeddings stretched over longer contexts, against transformers."""

import json
from types import SimpleNamespace

import pytest
import torch

from slotline.errors import CheckpointError, ConfigError
from slotline.plugins.models.fields import Fields
from slotline.plugins.models.gguf_config import gguf_rope_scaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 2048),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 1024),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        512,
    ),
    "yarn": (YARN, 512),
    "yarn, own factors": ({**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0}, 512),
    "yarn, two scales": ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, 512),
    "yarn, fractions of channels": ({**YARN, "truncate": False}, 512),
    "yarn, a stretched context": ({"rope_type": "yarn", "factor": 4.0}, 2048),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scalings(tiny, same_answers, open_checkpoint, tmp_path, case):
    table, context = SCALINGS[case]
    model = tiny("LlamaForCausalLM", rope_parameters={"rope_theta": 10000.0, **table}, head_dim=16)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.context_length == context
    same_answers(checkpoint, model)


def test_older_configs_keep_theta_and_scaling_apart(tiny, same_answers, open_checkpoint, tmp_path, edit_json):
    model = tiny("LlamaForCausalLM", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    model.save_pretrained(tmp_path)
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )
    same_answers(open_checkpoint(tmp_path), model, lengths=[40])


def test_gemma3_scales_its_global_layers_only(tiny, same_answers, open_checkpoint, tmp_path, edit_json):
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    options = {"sliding_window": 8, "num_hidden_layers": 7, "rope_parameters": ropes}
    model = tiny("Gemma3ForCausalLM", **options)
    model.save_pretrained(tmp_path)
    same_answers(open_checkpoint(tmp_path), model, lengths=[40])
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        layer_types=None,
        sliding_window_pattern=6,
        rope_theta=50_000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.context_length == 512, "Gemma's configs give the length after stretching"
    same_answers(checkpoint, model, lengths=[40])


# Dynamic scaling: a sequence beyond the trained length turns by a base of its own.

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize("length", [20, 50, 64, 100])
def test_dynamic_scaling_beyond_the_trained_length(tiny, same_answers, open_checkpoint, tmp_path, length):
    """Prompts and answers that stay below 64 positions, grow beyond them, or start there."""
    for deterministic in (False, True):
        # A new one each time: transformers' keeps the base of the longest sequence that it has seen.
        model = tiny("LlamaForCausalLM", max_position_embeddings=64, **DYNAMIC)
        model.save_pretrained(tmp_path)
        same_answers(
            open_checkpoint(tmp_path),
            model,
            lengths=[length],
            count=28,
            chunks=[length // 2, length - length // 2],
            prefix_caching=False,
            deterministic=deterministic,
        )


def test_dynamic_scaling_does_not_share_prefixes_beyond_the_trained_length(tiny, answer, open_checkpoint, tmp_path):
    tiny("LlamaForCausalLM", max_position_embeddings=64, **DYNAMIC).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.context_length == 128
    with pytest.raises(ConfigError, match=r"max_model_len is 100, but beyond 64 tokens.*set prefix_caching to False"):
        answer(checkpoint, [1, 2, 3], 2, max_model_len=100)
    _, tokens = answer(checkpoint, [1, 2, 3], 2)
    assert len(tokens) == 2


def test_internlm_has_its_own_key_for_the_rotation(tiny, same_answers, open_checkpoint, tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 5000.0}
    model = tiny("LlamaForCausalLM", attention_bias=True, max_position_embeddings=64, rope_parameters=scaling)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"architectures": ["InternLMForCausalLM"], "bias": True, "attention_bias": None, "rope_parameters": None}
    for kind in ("dynamic", "origin"):
        own["rotary"] = {"base": 5000.0, "type": kind}
        (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
        same_answers(open_checkpoint(tmp_path), model, lengths=[30], count=30)
    own["rotary"] = {"base": 5000.0, "type": "spiral"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
    with pytest.raises(CheckpointError, match=r"rope_scaling: type 'spiral' is not supported; known: default"):
        open_checkpoint(tmp_path)


def test_yarn_from_gguf():
    values = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }

    scaling = gguf_rope_scaling(Fields(values, "tiny.gguf", "llama."), SimpleNamespace(tensors={}))
    assert (scaling.kind, scaling.factor, scaling.original_context_length) == ("yarn", 4.0, 128)
    assert scaling.attention_factor == pytest.approx(1 + 0.1 * torch.tensor(4.0).log().item())

    stretched = SimpleNamespace(tensors={"rope_factors_long.weight": None})
    with pytest.raises(CheckpointError, match=r"type 'longrope' is not supported.*shorter context"):
        gguf_rope_scaling(Fields({}, "tiny.gguf", "phi3."), stretched)
