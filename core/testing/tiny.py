"""A real checkpoint that is small enough to make in a test: a Llama of random weights with its tokenizer."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

END = "<|end|>"
# One sign for each byte, as byte-level tokenizers spell them: themselves where printable, else from U+0100 on.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [byte for byte in range(256) if byte not in _PLAIN]
SIGNS = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(0x100 + n) for n, byte in enumerate(_REST)}
MERGES = ["t h", "th e", "Ġ the", "o x", "q u", "o w", "Ġ d", "o g", "Ġd og"]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write config.json, model.safetensors and tokenizer.json to ``folder``, and return it.

    The logits are a few ids wider than the tokenizer, as in many real models.

    Args:
        config: keys of config.json to replace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [END, *SIGNS.values(), *(merge.replace(" ", "") for merge in MERGES)]
    merged = {**CONFIG, "vocab_size": len(tokens) + 3, "eos_token_id": 0, "bos_token_id": None, **config}
    _write_json(folder / "config.json", merged)
    _write_json(folder / "tokenizer.json", _tokenizer(tokens))
    _write_json(folder / "tokenizer_config.json", {"eos_token": END})
    _write_tensors(folder / "model.safetensors", _weights(merged, np.random.default_rng(seed)))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama, made once a session."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _tokenizer(tokens: list[str]) -> dict[str, Any]:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 0, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": bytes_,
        "decoder": bytes_,
        "model": {"type": "BPE", **nothing, "fuse_unk": False, "vocab": vocabulary, "merges": MERGES},
    }


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        square = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden))
        key_value = dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (narrow, hidden))
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        parts = {**norms, **square, **key_value, **mlp}
        shapes |= {f"{layer}{name}.weight": shape for name, shape in parts.items()}
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_tensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write float32 tensors in the safetensors format: length of the header, header, data."""
    ends = list(accumulate(tensor.nbytes for tensor in tensors.values()))
    header = {
        name: {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end - tensor.nbytes, end]}
        for (name, tensor), end in zip(tensors.items(), ends, strict=True)
    }
    text = json.dumps(header).encode()
    data = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
