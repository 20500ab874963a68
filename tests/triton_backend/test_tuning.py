"""Which way products are computed: what was measured, what is written of it and read, rules of thumb for the rest."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import torch

from slotline.errors import ConfigError
from slotline.kernels.tiled_gemm import Tile
from slotline.plugins.triton_backend import tune as tuner
from slotline.plugins.triton_backend.products import compute
from slotline.plugins.triton_backend.tuning import SHIPPED, Other, Product, Tuning, Use, file_name, read, write

QKV, UP = Product(6144, 4096, Use.PLAIN), Product(28672, 4096, Use.GATED)
TILE, WIDE = Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4)


def test_the_choice_of_the_next_larger_count_counts():
    tuning = Tuning({QKV: [(16, Other.FEW), (64, TILE), (128, Other.LIBRARY)]})
    chosen = [tuning.way(QKV, count, 2) for count in (2, 16, 17, 64, 65, 128, 5000)]
    assert chosen == [Other.FEW, Other.FEW, TILE, TILE, Other.LIBRARY, Other.LIBRARY, Other.LIBRARY]


def test_what_was_not_measured_follows_rules():
    tuning = Tuning({QKV: [(64, TILE)]})
    assert tuning.way(QKV, 8, 4) is Other.LIBRARY, "measured with 2 bytes an element"
    assert tuning.way(UP, 8, 2) is Other.FEW and tuning.way(UP, 17, 2) is Other.LIBRARY
    assert tuning.way(Product(28672, 4096, Use.PLAIN), 8, 2) is Other.LIBRARY


def test_every_way_has_a_turn():
    tuning = Tuning({QKV: [(16, Other.FEW), (64, TILE), (128, Other.LIBRARY)]})
    assert {tuning.way(QKV, count, 2) for count in tuning.turns(QKV)} == {Other.FEW, TILE, Other.LIBRARY}
    assert {tuning.way(UP, count, 2) for count in tuning.turns(UP)} == {Other.FEW, Other.LIBRARY}


def test_written_and_read(tmp_path):
    measured = {QKV: [(16, Other.FEW), (64, TILE)], UP: [(256, WIDE)]}
    write(tmp_path / "deep" / "a.json", measured, device="A GPU")
    assert read(tmp_path / "deep" / "a.json") == measured
    assert json.loads((tmp_path / "deep" / "a.json").read_text())["device"] == "A GPU"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*a\.json: .*; choose another place with --out"):
        write(tmp_path / "file" / "a.json", {})


def test_own_measurements_go_before_shipped_ones(tmp_path):
    write(tmp_path / file_name("NVIDIA H200"), {QKV: [(999, WIDE)]}, device="NVIDIA H200")
    shipped, both = Tuning.of("NVIDIA H200"), Tuning.of("NVIDIA H200", [tmp_path])
    assert both.way(QKV, 900, 2) == WIDE != shipped.way(QKV, 900, 2)
    assert both.way(UP, 64, 2) == shipped.way(UP, 64, 2)
    assert Tuning.of("a GPU that nobody tuned for").way(QKV, 32, 2) is Other.LIBRARY


def test_another_triton_counts_where_the_own_one_was_not_measured(tmp_path):
    for version, product, tile in (
        ("3.10.1", QKV, TILE),
        ("3.9.0", QKV, WIDE),
        ("3.9.0", UP, WIDE),
        ("3.8.0", UP, TILE),
    ):
        path = tmp_path / file_name("gpu", version)
        write(path, read(path) | {product: [(64, tile)]})
    assert [Tuning.of("gpu", [tmp_path], version=v).way(QKV, 64, 2) for v in ("3.10.0", "3.9.2", "3.7")] == [
        TILE,
        WIDE,
        TILE,
    ]
    assert [Tuning.of("gpu", [tmp_path], version=v).way(UP, 64, 2) for v in ("3.8.5", "3.10.0")] == [TILE, WIDE]


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"products": [{"rows": 1, "columns": 2, "use": "plain", "ways": [[1, "x"]]}]}']
)
def test_a_damaged_file_says_what_to_do(tmp_path, text):
    (tmp_path / file_name("gpu")).write_text(text)
    with pytest.raises(ConfigError, match=r"gpu-triton-.*json is damaged .*slotline tune"):
        Tuning.of("gpu", [tmp_path])


def test_every_shipped_file_can_be_read():
    files = list(SHIPPED.glob("*.json"))
    assert files
    for file in files:
        measured = read(file)
        about = json.loads(file.read_text())
        assert measured and file.name == file_name(about["device"], about["triton"])
        for choices in measured.values():
            counts = [most for most, _ in choices]
            assert counts == sorted(set(counts)) and set(counts) <= set(tuner.COUNTS)


def test_the_shipped_file_knows_the_products_of_the_speed_table():
    """Those of internlm2-7b and of Qwen3-0.6B."""
    measured = read(SHIPPED / file_name("NVIDIA H200", "3.6"))
    for hidden, queries, both, inner, vocab in ((4096, 4096, 6144, 14336, 92544), (1024, 2048, 4096, 3072, 151936)):
        assert {
            Product(both, hidden, Use.PLAIN),
            Product(hidden, queries, Use.NORMED),
            Product(2 * inner, hidden, Use.GATED),
            Product(hidden, inner, Use.NORMED),
            Product(vocab, hidden, Use.LOGITS),
        } <= set(measured)


def test_the_fastest_way_is_kept_where_it_is_clearly_faster():
    times = {Other.LIBRARY: 10.0, Other.FEW: 9.9}

    def measure(product, count, way):
        if count <= 16:
            return times.get(way, 20.0)
        return {Other.LIBRARY: 10.0, TILE: 9.0 if count <= 128 else 11.0}.get(way)

    assert tuner.tune(QKV, measure) == [(32, Other.LIBRARY), (128, TILE), (8192, Other.LIBRARY)]
    times[Other.FEW] = 9.7
    lines = []
    assert tuner.tune(QKV, measure, lines.append)[0] == (16, Other.FEW)
    assert len(lines) == len(tuner.COUNTS) and "few 9.7, library 10.0" in lines[0]


def test_logits_are_measured_for_as_many_rows_as_sample():
    asked = []
    tuner.tune(Product(9, 8, Use.LOGITS), lambda product, count, way: asked.append(count) or 1.0)
    assert max(asked) == tuner.MOST_LOGITS


@pytest.mark.parametrize("product", [QKV, UP])
@pytest.mark.parametrize("count", [2, 33, 64, 700, 2048, 8192])
def test_tiles_that_are_tried_are_not_mostly_empty(product, count):
    tried = list(tuner.ways(product, count))
    assert Other.LIBRARY in tried and (Other.FEW in tried) == (count <= 16)
    tiles = [way for way in tried if isinstance(way, Tile)]
    assert tiles and all(tile.rows <= 32 or tile.rows < 2 * count for tile in tiles)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("way", [Other.LIBRARY, Other.CUBLASLT])
def test_libraries_multiply(way, biased):
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    found = compute(way, x, weight, bias if biased else None, Use.PLAIN, zeros=torch.zeros(6))
    torch.testing.assert_close(found, x @ weight.t() + (bias if biased else 0))
    assert way in tuner.ways(QKV, 64)


def test_only_what_a_norm_adds_up_comes_in_parts():
    def parts(use, count):
        return {way.parts for way in tuner.ways(Product(4096, 4096, use), count) if isinstance(way, Tile)}

    assert parts(Use.NORMED, 256) == {1, 2, 4}
    assert parts(Use.NORMED, 1024) == parts(Use.PLAIN, 256) == parts(Use.GATED, 256) == parts(Use.LOGITS, 256) == {1}


def test_tuning_needs_a_gpu(tmp_path):
    from click.testing import CliRunner

    from slotline.plugins.triton_backend.tune_command import tune_models

    if torch.cuda.is_available():
        pytest.skip("there is one")
    failed = CliRunner().invoke(tune_models, [str(tmp_path), "--device", "cpu"])
    assert isinstance(failed.exception, ConfigError) and "tuning needs a CUDA GPU" in str(failed.exception)


@pytest.mark.gpu
def test_tune_measures_and_writes(tmp_path):
    from click.testing import CliRunner

    from slotline.plugins.triton_backend.tune_command import tune_models
    from slotline.testing import write_tiny_llama

    model = write_tiny_llama(tmp_path / "model")
    done = CliRunner().invoke(tune_models, [str(model), "--out", str(tmp_path / "t.json")], catch_exceptions=False)
    assert done.exit_code == 0 and len(read(tmp_path / "t.json")) == 5, done.output
