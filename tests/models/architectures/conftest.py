"""Tiny random models of every architecture that transformers has, and their answers here and there."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from slotline.config import EngineConfig
from slotline.model import Model
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.testing import StepDriver, Work

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that greedy choices are not near-ties
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="session")
def tiny():
    """Return a function that makes a random model of transformers' class `kind`; keywords are its config's."""

    def make(kind: str, **options):
        import transformers

        made_for = {"Gemma3ForCausalLM": "Gemma3TextConfig"}
        config_class = getattr(transformers, made_for.get(kind, kind.replace("ForCausalLM", "Config")))
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config_class(**{**SIZES, **options})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))  # made as zeros and ones, which hide mistakes
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
        model.set_attn_implementation("eager")  # the one that knows soft caps
        return model

    return make


@pytest.fixture
def answer():
    """Return a function that gives a checkpoint's logits on a prompt [T, V] and its greedy tokens."""
    with ExitStack() as stack:

        def run(checkpoint, prompt, count=64, chunks=None, **options):
            c = checkpoint.config
            model = Model(
                name="tiny",
                tokenizer=None,
                vocab_size=c.vocab_size,
                context_length=c.context_length,
                architecture=c.architecture,
                checkpoint=checkpoint,
            )
            backend = TorchBackend()
            info = backend.load(EngineConfig.of(**{"max_slots": 2, "kv_cache_tokens": 1024, **options}), model)
            stack.callback(backend.close)
            driver, logits = StepDriver(backend, info), []
            record_logits(backend, logits)
            driver.admit(0, prompt, max_tokens=count, prompt_logprobs=0)
            chunks = chunks or [len(prompt)]
            steps = [driver.step(Work(0, n, sample=i == len(chunks) - 1)) for i, n in enumerate(chunks)]
            steps += [driver.step(Work(0, 1)) for _ in range(count - 1)]
            tokens = [int(step.tokens[0, 0]) for step in steps[len(chunks) - 1 :]]
            return torch.cat(logits)[: len(prompt)], tokens

        yield run


def record_logits(backend, logits):
    """Keep what the decoder gives: the prompt's logits come first, those of scoring before the sampled one."""
    decoder = backend._runner._decoder
    compute = decoder.logits

    def recorded(hidden):
        found = compute(hidden)
        logits.append(found.clone())
        return found

    decoder.logits = recorded


@pytest.fixture(scope="session")
def reference():
    """Return a function that gives transformers' logits and greedy tokens."""

    def run(model, prompt, count=64):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = model(ids).logits[0].float()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return logits, out[0, len(prompt) :].tolist()

    return run


@pytest.fixture
def same_answers(answer, reference):
    """Return a function that compares a checkpoint with a transformers model on a short and a long prompt."""

    def check(checkpoint, model, *, lengths=(1, 70), count=64, **options):
        for length in lengths:
            prompt = [int(t) for t in np.random.default_rng(length).integers(0, VOCAB, length)]
            expected_logits, expected = reference(model, prompt, count)
            logits, tokens = answer(checkpoint, prompt, count, **options)
            torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-5)
            assert tokens == expected, f"prompt of {length}"

    return check
