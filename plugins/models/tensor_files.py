"""Weight files of Hugging Face folders: safetensors, and pickles behind a flag; single or in shards."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import StoredTensor

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}


class SafetensorsStore:
    """The safetensors files of one model; headers are read and checked when it is made.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or index and shards disagree.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path if path.is_dir() else path.parent
        self.where = path.name
        files, index = shards_of(path, "model", ".safetensors")
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            self._read_header(file)
        check_index(index, self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; changing it never changes the file."""
        from safetensors import SafetensorError, safe_open

        file = self._folder / self.tensors[name].file
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{file.name}: cannot read tensor {name}: {error}; fetch the file again") from error
        return tensor

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    self._add(name, tuple(part.get_shape()), str(part.get_dtype()), file.name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file.name} is truncated or damaged: {error}; fetch the file again") from error

    def _add(self, name: str, shape: tuple[int, ...], kind: str, file: str) -> None:
        if name in self.tensors:
            raise CheckpointError(f"tensor {name} is in {self.tensors[name].file} and in {file}; remove the stray file")
        dtype = _DTYPES.get(kind, kind)
        self.tensors[name] = StoredTensor(shape, dtype, file, math.prod(shape) * _BYTES.get(dtype, 1))


class PickleStore:
    """The .bin files of one model, read with ``weights_only``: tensors and plain containers, no code.

    Raises:
        CheckpointError: a file is missing or damaged, holds anything else, or index and shards disagree.
    """

    def __init__(self, path: Path) -> None:
        self.where = path.name
        files, index = shards_of(path, "pytorch_model", ".bin")
        self._loaded: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            self._read(file)
        check_index(index, self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; changing it never changes the file."""
        return self._loaded[name]

    def _read(self, file: Path) -> None:
        import pickle

        import torch

        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{file.name} is damaged or holds more than tensors, and is not loaded: {reason}; "
                "take the safetensors version of the model"
            ) from error
        if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise CheckpointError(f"{file.name} is not a mapping of names to tensors; take the safetensors version")
        for name, tensor in loaded.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors[name] = StoredTensor(tuple(tensor.shape), dtype, file.name, tensor.nbytes)
        self._loaded.update(loaded)


def shards_of(path: Path, stem: str, suffix: str) -> tuple[list[Path], Mapping[str, str]]:
    """Return the weight files, and the index's map from tensor to file, empty for a single one.

    Args:
        path: a folder, or one weight file.
        stem: the name files of a folder have without shards, such as "model".
        suffix: their ending.

    Raises:
        CheckpointError: a shard is missing, or files lie there without an index.
    """
    if path.is_file():
        return [path], {}
    index_file = path / f"{stem}{suffix}.index.json"
    if index_file.is_file():
        weight_map = _weight_map(index_file)
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (path / name).is_file():
                raise CheckpointError(
                    f"{path} has no file {name}, which {index_file.name} names; fetch the missing shard"
                )
        return [path / name for name in names], weight_map
    single = path / f"{stem}{suffix}"
    found = sorted(path.glob(f"*{suffix}"))
    if single in found:
        return [single], {}
    if len(found) == 1:
        return found, {}
    raise CheckpointError(
        f"{path} has {len(found)} {suffix} files but no {index_file.name}, which says how they belong together; "
        "fetch it too"
    )


def _weight_map(file: Path) -> dict[str, str]:
    """Read an index file; its shards lie beside it."""
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file.name} has no weight_map from tensors to files; fetch it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{file.name} names the file {shard!r:.80}; allowed: a name in the same folder")
    return weight_map


def check_index(weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that each tensor is in the shard that the index names.

    Raises:
        CheckpointError: naming tensor and shard.
    """
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != shard:
            raise CheckpointError(f"{shard} has no tensor {name}, which the index places there; fetch the shard again")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a model's folder.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is not a JSON object; fetch it again")
    return values
