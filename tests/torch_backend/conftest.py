"""Tiny random models, the real one, and a backend loaded with either."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from slotline.config import EngineConfig
from slotline.manager import PluginManager
from slotline.model import Model
from slotline.params import SamplingParams
from slotline.plan import RowSetup
from slotline.plugins import models
from slotline.plugins.models.decoder import DecoderConfig, expected_tensors
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.testing import StepDriver

VOCAB = 97
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FakeCheckpoint:
    """A transformers model behind the interface that backends read."""

    def __init__(self, model) -> None:
        c = model.config
        self.config = DecoderConfig(
            architecture="llama",
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_layers=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            vocab_size=c.vocab_size,
            context_length=c.max_position_embeddings,
            rms_eps=c.rms_norm_eps,
            rope_theta=c.rope_parameters["rope_theta"],
            tie_embeddings=c.tie_word_embeddings,
            attention_bias=c.attention_bias,
            output_bias=c.attention_bias,
            mlp_bias=c.mlp_bias,
        )
        self._state = model.state_dict()

    def names(self) -> list[str]:
        return list(expected_tensors(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        *prefix, part = name.split(".")
        kind = "bias" if part.endswith("_bias") else "weight"
        hf = _HF_NAMES[part.removesuffix("_bias")].replace("weight", kind)
        return self._state[f"model.layers.{prefix[1]}.{hf}" if prefix else hf].clone()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., tuple]:
    """Make a random Llama as transformers has it and as a backend reads it; keywords are fields of `LlamaConfig`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, seed: int = 0, **options):
        base = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,  # wide, so that greedy choices are not near-ties
        }
        torch.manual_seed(seed)
        hf = LlamaForCausalLM(LlamaConfig(**{**base, **options})).eval()
        with torch.no_grad():
            for name, parameter in hf.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))  # made as zeros and ones, which hide mistakes
        hf.generation_config.eos_token_id = hf.generation_config.pad_token_id = None
        checkpoint = FakeCheckpoint(hf)
        return hf, Model(
            name="tiny",
            tokenizer=None,
            vocab_size=checkpoint.config.vocab_size,
            context_length=checkpoint.config.context_length,
            architecture="llama",
            checkpoint=checkpoint,
        )

    return make


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """Open SmolLM2-135M-Instruct."""
    manager = PluginManager(plugins="")
    if "slotline.plugins.models" not in [p.name for p in manager.plugins()]:
        manager.register(models, "models")
    return manager.hook.slotline_open_model(config=EngineConfig(), manager=manager)


@pytest.fixture
def load() -> Iterator[Callable[..., StepDriver]]:
    """Load a model into a backend; keywords are engine options, or the backend to load it into."""
    with ExitStack() as stack:

        def driver(model: Model, backend: TorchBackend | None = None, **options) -> StepDriver:
            backend = backend or TorchBackend()
            config = EngineConfig.of(**{"max_slots": 16, "kv_cache_tokens": 4096, **options})
            info = backend.load(config, model)
            stack.callback(backend.close)
            return StepDriver(backend, info)

        yield driver


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[int]]:
    """Run transformers' greedy `generate`."""

    def run(hf, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return out[0, len(prompt) :].tolist()

    return run


@pytest.fixture(scope="session")
def setup_row() -> Callable[..., RowSetup]:
    """Make a RowSetup; keywords are its own fields or those of SamplingParams."""

    def make(prompt=(1, 2, 3), output=(), row: int = 0, min_tokens: int = 0, **options) -> RowSetup:
        setup = RowSetup(
            row=row,
            epoch=row + 1,
            params=SamplingParams(),
            seed=0,
            token_ids=np.array([*prompt, *output], np.int32),
            prompt_len=len(prompt),
            stop_ids=(),
            min_len=len(prompt) + min_tokens,
            max_len=len(prompt) + 64,
        )
        own = {name: options.pop(name) for name in list(options) if hasattr(setup, name)}
        if "logprobs" in options:
            own["logprobs"] = options.pop("logprobs")
        return replace(setup, params=SamplingParams(**options).resolved({}), **own)

    return make
