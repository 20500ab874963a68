"""The plugin that docs/models.md shows adds an architecture, and the page names what there is."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slotline.config import EngineConfig
from slotline.errors import CheckpointError
from slotline.manager import PluginManager
from slotline.plugins.models.architectures import BUILT_IN
from slotline.plugins.models.opening import open_checkpoint as open_with
from slotline.plugins.models.pypi import BUILT_IN_NAMES

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def baichuan(tiny, tmp_path):
    """A transformers Llama, and the folder of a Baichuan that computes the same."""
    model = tiny("LlamaForCausalLM", num_key_value_heads=6)
    state = model.state_dict()
    for i in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{i}.self_attn."
        parts = [state.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        state[f"{prefix}W_pack.weight"] = torch.cat(parts)
    save_file(state, tmp_path / "model.safetensors")
    config = model.config.to_dict()
    del config["num_key_value_heads"]
    config |= {"architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model, tmp_path


def test_the_example_adds_an_architecture(baichuan, same_answers, open_checkpoint):
    model, folder = baichuan
    with pytest.raises(CheckpointError, match="architecture 'BaiChuanForCausalLM' is not supported"):
        open_checkpoint(folder)
    spec = importlib.util.spec_from_file_location("baichuan", DOCS / "examples" / "baichuan.py")
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    manager = PluginManager(plugins="")
    manager.register(plugin, "baichuan")
    checkpoint = open_with(folder, EngineConfig.of(str(folder)), manager)
    assert checkpoint.config.architecture == "baichuan"
    same_answers(checkpoint, model, lengths=[30], count=16)


def test_the_page_names_what_there_is(manager):
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for architecture in BUILT_IN:
        assert any(name in row for row in rows for name in architecture.hf_names), architecture.name
    named = manager.registry("chat_templates")
    assert all(f"`{name}`" in page for name in [*named, *BUILT_IN_NAMES])


def test_the_page_names_tests_that_exist():
    import re

    page = (DOCS / "models.md").read_text(encoding="utf-8")
    tests = (Path(__file__).parents[1] / "test_cases.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_(?:ml|ch)_\d\d_\w+)`", page))
    assert named == set(re.findall(r"def (test_(?:ml|ch)_\d\d_\w+)", tests))
