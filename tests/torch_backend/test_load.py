"""Loading: sizes, devices and types, and the sentence that says what to do."""

import subprocess
import sys
import weakref

import pytest
import torch

from slotline.config import EngineConfig
from slotline.errors import CheckpointError, ConfigError, ModelError
from slotline.plugins.torch_backend.backend import TorchBackend
from slotline.plugins.torch_backend.memory import cache_size, free_host_memory, refusing_what_is_too_large

MIB = 2**20


def size(free=1000 * MIB, max_model_len=2048, **options):
    config = EngineConfig.of(**options)
    return cache_size(config, max_model_len=max_model_len, bytes_per_token=1024, free=free, share=0.5)


def test_the_default_serves_every_slot_up_to_2048_tokens():
    assert size(max_slots=4).num_blocks == 4 * 2048 // 16 + 1
    assert size(max_slots=4, max_model_len=100).num_blocks == 4 * 7 + 1
    assert size(max_slots=4, max_model_len=8000).num_blocks == 4 * 128 + 1
    assert size(max_slots=4, max_model_len=16_000).num_blocks == 1000 + 1


def test_the_default_takes_a_share_of_free_memory_but_holds_one_sequence():
    assert size(free=100 * MIB, max_slots=64).nbytes <= 50 * MIB
    assert (size(free=100 * MIB, max_slots=64, max_model_len=90_000).num_blocks - 1) * 16 >= 90_000


def test_the_size_that_was_asked_for():
    assert size(kv_cache_tokens=385, block_size=32).num_blocks == 13 + 1  # shorter than a sequence, and that is fine
    assert size(kv_cache_fraction=0.25).nbytes <= 250 * MIB
    assert size(kv_cache_fraction=0.25).nbytes > 249 * MIB


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"free": MIB}, "1 MiB of memory are free.*takes 2 MiB.*set max_model_len to 1008 or less"),
        ({"kv_cache_fraction": 0.01, "free": 10 * MIB}, r"kv_cache_fraction is 0\.01.*set max_model_len to 80 or less"),
        ({"kv_cache_tokens": 10_000_000}, "kv_cache_tokens is 10000000.*up to"),
        ({"block_size": 17}, "block_size is 17; allowed with backend torch: 16, 32, 64, 128"),
    ],
)
def test_what_cannot_be_had_is_refused_with_numbers(options, match):
    with pytest.raises(ConfigError, match=match):
        size(**options)


def test_free_memory_is_plausible():
    assert 50 * MIB < free_host_memory() < 2**50


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float16", "device": "cpu"}, "use float32 or bfloat16"),
        ({"device": "tpu9"}, "allowed with backend torch: auto, cpu, cuda"),
        ({"device": "cuda:99"}, "use device cpu"),
        ({"max_model_len": 513}, "max_model_len is 513; allowed: 2 to 512"),
    ],
)
def test_options_that_do_not_fit_are_refused(tiny, load, options, match):
    _, model = tiny()
    with pytest.raises(ConfigError, match=match):
        load(model, **options)


def test_an_unknown_activation_is_refused(tiny, load):
    from dataclasses import replace

    _, model = tiny()
    model.checkpoint.config = replace(model.checkpoint.config, hidden_act="relu6")
    with pytest.raises(CheckpointError, match=r"hidden_act is 'relu6'.*silu"):
        load(model)


def test_load_reports_memory_and_shape(tiny, load):
    _, model = tiny()
    driver = load(model, max_model_len=100, block_size=32, kv_cache_tokens=320)
    info = driver.info
    assert (info.num_blocks, info.block_size, info.max_model_len, info.vocab_size) == (11, 32, 100, 97)
    assert info.bytes_per_block == 32 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, width, float32
    assert info.memory_report["kv_cache"] == 11 * info.bytes_per_block
    assert info.memory_report["weights"] > 0


def test_threads_are_set_only_where_asked(tiny, load):
    _, model = tiny()
    before = torch.get_num_threads()
    load(model)
    assert torch.get_num_threads() == before
    try:
        load(model, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_registering_does_not_import_torch():
    code = """
import sys, slotline.plugins.torch_backend as plugin
found = []
plugin.slotline_register_backends(found.append)
assert found[0].name == "torch" and found[0].auto_priority == 10 and found[0].unavailable() is None
assert "torch" not in sys.modules
print(type(found[0].create()).__name__)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "TorchBackend", done.stderr


def test_memory_that_runs_out_is_one_sentence_and_frees_what_was_loaded():
    loaded = []

    def load():
        weights = torch.zeros(4)
        loaded.append(weakref.ref(weights))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more lines")

    with pytest.raises(ModelError) as refused, refusing_what_is_too_large("m", "cuda:0"):
        load()
    assert str(refused.value).startswith("m does not fit into the memory of cuda:0; use fewer max_slots")
    assert str(refused.value).endswith("(CUDA out of memory. Tried to allocate 2 GiB)")
    assert loaded[0]() is None, "as long as the error is held, so was this"


def test_closing_says_nothing_of_a_device_that_failed(monkeypatch):
    def failed():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", failed)
    TorchBackend().close()
