"""The built-in backends pass the suite that outside backends are asked to pass."""

import json
from pathlib import Path

import pytest

from slotline.testing import BackendConformance
from slotline.testing.base import TEXT

END = "<|end|>"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint of a small Llama with random weights, and a byte-level tokenizer for it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 3,  # logits may be wider than the tokenizer
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.token_to_id(END),
        bos_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class TestEcho(BackendConformance, backend="echo"):
    """No model."""


class TestTorch(BackendConformance, backend="torch", device="cpu", dtype="float32"):
    """The reference, on a CPU."""

    @pytest.fixture
    def model(self, tiny_llama: Path) -> str:
        return str(tiny_llama)
