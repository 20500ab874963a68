"""lm-evaluation-harness over HTTP gives what it gives with transformers on the same weights and tokenizer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slotline import EngineConfig
from slotline.manager import PluginManager

TASKS = Path(__file__).parent / "lm_eval"
ITEMS = {"slotline_choice": 20, "slotline_last_word": 12, "slotline_text": 8}
LAYER = {
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

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: the extra eval"),
]


def llama_name(canonical: str) -> str:
    """Return a tensor's name in transformers' Llama."""
    if canonical.startswith("layers."):
        _, number, part = canonical.split(".")
        return f"model.layers.{number}.{LAYER[part]}.weight"
    return {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}[canonical]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the default model as transformers reads it: the same weights, as float32, and the same tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    manager = PluginManager("")
    model = manager.hook.slotline_open_model(config=EngineConfig(), manager=manager)
    checkpoint, tokenizer, folder = model.checkpoint, model.tokenizer, tmp_path_factory.mktemp("exported")
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        max_position_embeddings=c.context_length,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama = LlamaForCausalLM(config).float()
    weights = {llama_name(name): checkpoint.tensor(name).float() for name in checkpoint.names()}
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    llama.save_pretrained(folder)
    special = tokenizer.special
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token=special.bos, eos_token=special.eos
    ).save_pretrained(folder)
    return folder


def evaluate(out: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the harness, in a process of its own and without a network; return results and samples."""
    environ = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "home"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "lm_eval",
        "run",
        "--model",
        model,
        "--device",
        "cpu",
        "--tasks",
        *ITEMS,
        "--log_samples",
    ]
    listed = ",".join(f"{name}={value}" for name, value in arguments.items())
    done = subprocess.run(
        [*command, "--include_path", str(TASKS), "--output_path", str(out), "--model_args", listed],
        cwd=TASKS,  # the tasks name their files relative to it
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    samples: dict[str, list[Any]] = {}
    for task in ITEMS:
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        samples[task] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return {"scores": json.loads(results.read_text(encoding="utf-8"))["results"], "samples": samples}


@pytest.fixture(scope="module")
def both(server: Any, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """Evaluate over HTTP, then in transformers."""
    url = f"{server.url}/v1/completions"
    ours = {"model": "smollm2-135m", "base_url": url, "tokenizer": exported, "tokenizer_backend": "huggingface"}
    ours |= {"num_concurrent": 4, "max_retries": 1, "max_length": 2048}
    theirs = {"pretrained": exported, "dtype": "float32", "max_length": 2048}
    return (
        evaluate(tmp_path_factory.mktemp("ours"), "local-completions", ours),
        evaluate(tmp_path_factory.mktemp("theirs"), "hf", theirs),
    )


def numbers(responses: Any) -> list[float]:
    """Return the numbers of logged responses, in which a pair is a log-likelihood and whether it is greedy."""
    if isinstance(responses, list):
        return [number for response in responses for number in numbers(response)]
    return [1.0 if responses in (True, "True") else 0.0 if responses in (False, "False") else float(responses)]


@pytest.mark.parametrize("task", ITEMS)
def test_every_item_has_the_same_log_likelihood(both, task):
    ours, theirs = (run["samples"][task] for run in both)
    assert len(ours) == len(theirs) == ITEMS[task]
    assert numbers(ours) == pytest.approx(numbers(theirs), abs=1e-3)


@pytest.mark.parametrize("task", ITEMS)
def test_the_scores_are_the_same(both, task):
    ours, theirs = (run["scores"][task] for run in both)
    metrics = [name for name, value in theirs.items() if name.endswith(",none") and isinstance(value, float)]
    assert metrics
    for name in metrics:
        allowed = 1e-12 if name.startswith("acc") else 1e-3 * theirs[name]
        assert ours[name] == pytest.approx(theirs[name], abs=allowed), name
    assert ours.get("acc,none", 1) > 0.4  # chance is a third of three endings, and nothing for a last word
