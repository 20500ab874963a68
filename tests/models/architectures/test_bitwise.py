"""deterministic=True holds for every feature of the description: the same bits alone and in company, in any chunks."""

from contextlib import ExitStack

import numpy as np
import pytest

from slotline.config import EngineConfig
from slotline.model import Model
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.testing import StepDriver, Work

FEATURES = {
    "windows, normalised heads, norms around": ("Gemma3ForCausalLM", {"sliding_window": 8, "num_hidden_layers": 7}),
    "soft caps": (
        "Gemma2ForCausalLM",
        {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "half of each head turns": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "sliding_window": 20}),
    "dynamic rotation": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
}
PROMPT = [int(t) for t in np.random.default_rng(5).integers(0, 97, 90)]


@pytest.fixture
def driver(tiny, open_checkpoint, tmp_path):
    with ExitStack() as stack:

        def load(kind, **options):
            tiny(kind, **options).save_pretrained(tmp_path)
            checkpoint = open_checkpoint(tmp_path)
            c = checkpoint.config
            model = Model(
                name="tiny", tokenizer=None, vocab_size=97, context_length=c.context_length, checkpoint=checkpoint
            )
            backend = TorchBackend()
            config = EngineConfig.of(
                max_slots=8, kv_cache_tokens=2048, deterministic=True, prefix_caching=False, device="cpu"
            )
            info = backend.load(config, model)
            stack.callback(backend.close)
            return StepDriver(backend, info)

        yield load


def bits(step, line):
    place = int(step.n_tokens[:line].sum())
    entry = step.logprobs.slice(place, place + 1)
    return int(step.tokens[line, 0]), entry.ids.tobytes(), entry.values.tobytes()


@pytest.mark.parametrize("feature", FEATURES)
def test_the_same_bits_in_any_company(driver, feature):
    kind, options = FEATURES[feature]
    driver = driver(kind, **options)
    driver.admit(0, PROMPT, logprobs=20, max_tokens=6)
    alone = [driver.step(Work(0, 90))] + [driver.step(Work(0, 1)) for _ in range(5)]
    expected = [bits(step, 0) for step in alone]
    driver.end(0)

    for row, length in ((1, 3), (2, 70), (4, 1)):
        driver.admit(row, PROMPT[:length], logprobs=20, max_tokens=40)
    driver.admit(3, PROMPT, logprobs=20, max_tokens=6)
    driver.step(Work(1, 3), Work(3, 17, sample=False), Work(2, 50, sample=False))
    driver.step(Work(3, 40, sample=False), Work(4, 1), Work(1, 1))
    found = [bits(driver.step(Work(2, 20), Work(3, 33), Work(1, 1)), 1)]
    found += [bits(driver.step(Work(1, 1), Work(2, 1), Work(4, 1), Work(3, 1)), 3) for _ in range(5)]
    assert found == expected
