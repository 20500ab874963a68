"""Read a GGUF file's header with every length checked, and its tensors one at a time.

A parser of our own, because the one of the gguf package trusts the lengths it reads (a damaged count keeps it
busy for minutes) and takes seconds for a vocabulary; its table of types and its dequantisation are used.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slotline.errors import CheckpointError
from slotline.plugins.models.checkpoint import StoredTensor

if TYPE_CHECKING:
    import torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_MAX_DIMS = 8
_MAX_NAME = 256
_MAX_NESTING = 4


class _Cursor:
    """A position in the header that never leaves the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name_of_file = name
        self.at = 0

    def need(self, count: int, what: str) -> None:
        left = len(self.data) - self.at
        if count > left:
            raise CheckpointError(
                f"{self.name_of_file} is truncated or damaged: {what} at byte {self.at} claims {count} bytes, "
                f"{left} are left; fetch the file again"
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        self.at += length
        # Vocabularies may hold byte fragments; they never match text, whatever they are shown as.
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        """Read the name of a key or tensor, which is short and printable unless the file is damaged."""
        text = self.string(what)
        if not text.isprintable() or len(text) > _MAX_NAME:
            raise CheckpointError(f"{self.name_of_file} is damaged: {what} is not a name; fetch the file again")
        return text

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(what, depth)
        raise CheckpointError(
            f"{self.name_of_file} is damaged: {what} has the unknown type {kind}; fetch the file again"
        )

    def _array(self, what: str, depth: int) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            self.need(count * size, what)
            self.at += count * size
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, self.at - count * size))
        self.need(count * 8, what)  # a string or an array takes 8 bytes at least
        return [self.value(kind, what, depth + 1) for _ in range(count)]


class GGUFFile:
    """One opened GGUF file.

    Attributes:
        path: the file.
        metadata: all key-value pairs.
        tensors: shape (outermost first), type and size by the file's tensor names.

    Raises:
        CheckpointError: the file is not GGUF, is truncated, or describes overlapping tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self._offsets: dict[str, int] = {}
        self._data = self._map()
        cursor = _Cursor(self._data, path.name)
        tensor_count, pair_count = self._preamble(cursor)
        self.metadata = self._pairs(cursor, pair_count)
        infos = self._tensor_infos(cursor, tensor_count)
        self._place(infos, cursor.at)

    @property
    def where(self) -> str:
        """Return the file's name."""
        return self.path.name

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; quantized ones are dequantised to float32.

        Raises:
            CheckpointError: its type cannot be dequantised.
        """
        import torch
        from gguf import GGMLQuantizationType, quants

        stored, start = self.tensors[name], self._offsets[name]
        raw = np.frombuffer(self._data, np.uint8, stored.nbytes, start)
        if stored.dtype in _PLAIN.values():
            copy = torch.from_numpy(raw.copy()).view(getattr(torch, stored.dtype))
            return copy.reshape(stored.shape)
        kind = GGMLQuantizationType[stored.dtype]
        try:
            values = quants.dequantize(raw.reshape(math.prod(stored.shape[:-1]), -1), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.where}: tensor {name} has type {stored.dtype}, which cannot be dequantised; "
                "take a Q4, Q5, Q6, Q8 or F16 file"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(stored.shape)

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"cannot read {self.path}: {error}") from error

    def _preamble(self, cursor: _Cursor) -> tuple[int, int]:
        if bytes(self._data[:4]) != b"GGUF":
            raise CheckpointError(f"{self.where} is not a GGUF file: it does not start with 'GGUF'; fetch it again")
        cursor.at = 4
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            raise CheckpointError(f"{self.where} has GGUF version {version}; allowed: 2 and 3, little-endian")
        return cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")

    def _pairs(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        cursor.need(count * 13, "the metadata")  # a pair takes 13 bytes at least
        pairs: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.name("a metadata key")
            pairs[key] = cursor.value(cursor.scalar("I", key), key)
        return pairs

    def _tensor_infos(self, cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        cursor.need(count * 24, "the tensor list")  # an entry takes 24 bytes at least
        infos = []
        for _ in range(count):
            name = cursor.name("a tensor name")
            dims = cursor.scalar("I", name)
            if dims > _MAX_DIMS:
                raise CheckpointError(
                    f"{self.where} is damaged: tensor {name} has {dims} dimensions; fetch the file again"
                )
            shape = tuple(cursor.scalar("Q", name) for _ in range(dims))[::-1]
            infos.append((name, shape, cursor.scalar("I", name), cursor.scalar("Q", name)))
        return infos

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], header_end: int) -> None:
        """Turn relative offsets into file positions, all inside the file and apart from each other."""
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1:
            raise CheckpointError(f"{self.where}: general.alignment is {align!r}; allowed: an integer, at least 1")
        base = -(-header_end // align) * align
        for name, shape, kind, offset in infos:
            dtype, nbytes = self._size(name, shape, kind)
            start, end = base + offset, base + offset + nbytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{self.where} is truncated: tensor {name} ends at byte {end}, the file at {len(self._data)}; "
                    "fetch the file again"
                )
            if name in self.tensors:
                raise CheckpointError(f"{self.where} is damaged: it has two tensors named {name}; fetch the file again")
            self.tensors[name] = StoredTensor(shape, dtype, self.where, nbytes)
            self._offsets[name] = start
        previous, previous_end = "", base
        for name in sorted(self._offsets, key=self._offsets.__getitem__):
            if self._offsets[name] < previous_end:
                raise CheckpointError(
                    f"{self.where} is damaged: tensors {previous} and {name} overlap; fetch the file again"
                )
            previous, previous_end = name, self._offsets[name] + self.tensors[name].nbytes

    def _size(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quant = GGMLQuantizationType(kind)
        except ValueError as error:
            raise CheckpointError(
                f"{self.where}: tensor {name} has the unknown type {kind}; a newer gguf package may know it"
            ) from error
        block, size = GGML_QUANT_SIZES[quant]
        if shape and shape[-1] % block:
            raise CheckpointError(
                f"{self.where} is damaged: rows of {name} are not whole blocks of {quant.name}; fetch it again"
            )
        return _PLAIN.get(quant.name, quant.name), math.prod(shape) // block * size
