"""Gemma 3 270M from its wheels: transformers' answers, from the same file."""

import pytest
import torch

from slotline.config import EngineConfig
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.testing import StepDriver, Work

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # transformers takes a minute to read the file

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "The three laws of robotics are:\n1.",
    "Die Hauptstadt von Deutschland ist",
    "東京は日本の",
    "Q: What is the boiling point of water?\nA:",
    "<h1>Welcome</h1>\n<p>",
    "The history of mathematics begins long before " + "the invention of writing; tallies on bones and " * 60,
]
COUNT = 32


@pytest.fixture(scope="module")
def theirs(gemma3_file):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gemma3_file.parent, gguf_file=gemma3_file.name).eval()
    model.generation_config.eos_token_id = None
    return model


def test_greedy_tokens(gemma3, gemma3_theirs, theirs):
    backend = TorchBackend()
    config = EngineConfig.of("gemma3-270m", max_slots=10, kv_cache_tokens=4096, max_model_len=1024)
    driver = StepDriver(backend, backend.load(config, gemma3))
    ids = [gemma3.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert ids == [gemma3_theirs.encode(prompt) for prompt in PROMPTS]
    assert len(ids[-1]) > 512, "longer than the window"
    for row, prompt in enumerate(ids):
        driver.admit(row, prompt, max_tokens=COUNT)
    steps = [driver.step(*(Work(row, len(prompt)) for row, prompt in enumerate(ids)))]
    steps += [driver.step(*(Work(row, 1) for row in range(len(ids)))) for _ in range(COUNT - 1)]
    backend.close()
    for row, prompt in enumerate(ids):
        inputs = torch.tensor([prompt])
        options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False}
        with torch.inference_mode():
            out = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        assert [int(step.tokens[row, 0]) for step in steps] == out[0, len(prompt) :].tolist(), PROMPTS[row][:40]


def test_what_the_file_says(gemma3):
    config = gemma3.checkpoint.config
    assert (config.architecture, config.num_layers, config.sliding_window) == ("gemma3", 18, 512)
    assert config.global_layers == {5, 11, 17}
    assert gemma3.checkpoint.num_parameters == 268_098_176
    assert gemma3.eos_ids >= {1}
