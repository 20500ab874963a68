"""GGUF models in several files, and every type of tensor that the gguf package can dequantise."""

import shutil

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from slotline.errors import CheckpointError
from slotline.plugins.models.gguf_file import GGUFFile
from slotline.plugins.models.gguf_split import SplitGGUF, first_parts, open_gguf

QUANTIZED = sorted(quants._type_traits, key=lambda kind: kind.name)
PLAIN = [GGMLQuantizationType.F32, GGMLQuantizationType.F16]
# The largest error in terms of the largest value, with the package's own quantiser; the others have none.
ERRORS = {"BF16": 0.005, "Q8_0": 0.005, "Q5_0": 0.07, "Q5_1": 0.04, "Q4_0": 0.13, "Q4_1": 0.08, "F32": 0, "F16": 0.001}
ERRORS |= {"TQ1_0": 0.6, "TQ2_0": 0.6, "MXFP4": 0.3, "NVFP4": 0.3, "IQ4_NL": 0.15}


def write_tensor(path, array, kind):
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", [*PLAIN, *QUANTIZED], ids=lambda kind: kind.name)
def test_every_type_is_read(tmp_path, kind):
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, (6, 512)).astype(np.float32)
    try:
        packed = quants.quantize(values, kind)
    except NotImplementedError:
        packed = random_blocks(rng, kind, values.size)
        values = None
    file = write_tensor(tmp_path / "w.gguf", packed.reshape(6, -1), kind)
    read = file.read("w")
    assert read.shape == (6, 512) == file.tensors["w"].shape
    expected = torch.from_numpy(np.ascontiguousarray(quants.dequantize(packed.reshape(6, -1), kind)))
    torch.testing.assert_close(read.float(), expected, rtol=0, atol=0, equal_nan=True)
    if values is not None:
        assert np.abs(read.float().numpy() - values).max() <= ERRORS[kind.name]


def random_blocks(rng, kind, count):
    """Any bytes are a block of these types; the halves that scale it stay small."""
    block, size = GGML_QUANT_SIZES[kind]
    return rng.integers(0, 60, (6, count // 6 // block * size), dtype=np.uint8)


def test_the_list_is_complete():
    """A type that a newer gguf package can dequantise is in the test above by itself."""
    assert {"Q4_K", "Q6_K", "IQ2_XXS", "IQ1_M", "TQ1_0", "MXFP4"} <= {kind.name for kind in QUANTIZED}


def test_a_type_that_cannot_be_dequantised(tmp_path):
    kind = next(kind for kind in (GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K) if kind not in QUANTIZED)
    block, size = GGML_QUANT_SIZES[kind]
    file = write_tensor(tmp_path / "w.gguf", np.zeros((2, 512 // block * size), np.uint8), kind)
    with pytest.raises(CheckpointError, match=rf"w\.gguf: tensor w has type {kind.name}, which cannot be dequantised"):
        file.read("w")


# Several files


@pytest.fixture
def split(tiny_llama, write_gguf):
    """A tiny model whose converter cut it into files of five tensors."""
    whole = write_gguf(tiny_llama().model)
    folder = whole.parent / "split"
    folder.mkdir()
    shutil.copy(whole, folder / "whole.gguf")
    whole.unlink()
    cut(folder / "whole.gguf", folder)
    return folder


def cut(path, folder, size=5):
    """Write a file's tensors again, some in each file, as llama-gguf-split does: metadata in the first."""
    file = GGUFFile(path)
    names = list(file.tensors)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    header = path.read_bytes()
    for number, part in enumerate(parts):
        writer = GGUFWriter(folder / f"tiny-{number + 1:05}-of-{len(parts):05}.gguf", "llama")
        if number == 0:
            copy_metadata(writer, file.metadata)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(parts))
        writer.add_int32("split.tensors.count", len(names))
        for name in part:
            writer.add_tensor(name, file.read(name).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert header == path.read_bytes()


def copy_metadata(writer, metadata):
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def test_parts_are_one_model(split, open_model):
    whole = open_model(split / "whole.gguf")
    (split / "whole.gguf").unlink()
    parts = sorted(split.glob("*.gguf"))
    assert len(parts) > 2
    for path in (split, *parts):
        model = open_model(path)
        assert model.checkpoint.config == whole.checkpoint.config
        assert model.checkpoint.weight_bytes == whole.checkpoint.weight_bytes
        for name in model.checkpoint.names():
            assert torch.equal(model.checkpoint.tensor(name), whole.checkpoint.tensor(name))


def test_a_part_is_missing_or_another(split, open_model):
    (split / "whole.gguf").unlink()
    first, second, third, *_ = sorted(split.glob("*.gguf"))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-\d+\.gguf says that it is part 3 of \d; it is not what"):
        open_model(split)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"split has no file tiny-00002-of-\d+\.gguf, part 2 of \d; fetch it"):
        open_model(first)
    second.write_bytes(kept[:-10])
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-\d+\.gguf is truncated"):
        open_model(first)


def test_two_parts_with_one_tensor(tmp_path):
    paths = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path in paths:
        write_tensor(path, np.zeros((2, 4), np.float32), None)
    with pytest.raises(CheckpointError, match=r"tensor w is in m-00001.* and in m-00002.*parts of different models"):
        SplitGGUF(paths)


def test_names_of_parts(tmp_path):
    assert first_parts(["a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "b.gguf"]) == [
        "a-00001-of-00002.gguf",
        "b.gguf",
    ]
    odd = tmp_path / "a-00003-of-00002.gguf"
    write_tensor(odd, np.zeros((2, 4), np.float32), None)
    assert isinstance(open_gguf(odd), GGUFFile), "no such part can be: it is only called so"
