"""The built-in backends pass the suite that outside backends are asked to pass."""

from pathlib import Path

import pytest

from slotline.testing import BackendConformance

pytest_plugins = ["slotline.testing"]


class TestEcho(BackendConformance, backend="echo"):
    """No model."""


class TestTorch(BackendConformance, backend="torch", device="cpu", dtype="float32", threads=1):
    """The reference, on a CPU."""

    @pytest.fixture
    def model(self, tiny_llama: Path) -> str:
        return str(tiny_llama)


def test_the_tiny_checkpoint_is_one_that_transformers_reads(tiny_llama):
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, model = AutoTokenizer.from_pretrained(tiny_llama), LlamaForCausalLM.from_pretrained(tiny_llama)
    ids = tokenizer.encode("the dog é🦙")
    assert tokenizer.decode(ids) == "the dog é🦙" and len(ids) == 9
    with torch.inference_mode():
        assert model(torch.tensor([ids])).logits.isfinite().all()
