"""A checkpoint: a decoder description and its tensors by canonical name, read one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from slotline.errors import CheckpointError
from slotline.plugins.models.decoder import DecoderConfig, expected_tensors

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
TORCH_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it.

    Attributes:
        dtype: a torch dtype's name, or a quantized type's own, such as "Q4_1".
        file: the name of the file that holds it.
        nbytes: its size in that file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int


class TensorStore(Protocol):
    """Opened weight files: headers are read and checked, data is not."""

    @property
    def where(self) -> str:
        """Return the file's or folder's name, for messages."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return every tensor by the name it has in the file."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU in memory of its own; quantized ones as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How one kind of file names the decoder's tensors.

    Attributes:
        names: canonical name to the file's; ``{i}`` stands for the layer.
        ignored: patterns of names that carry nothing a decoder needs.
        interleaved: tensors whose rotary channels are stored in pairs (2i, 2i + 1) and are put back
            into halves (i, i + head_dim / 2), with their biases.
    """

    names: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    interleaved: frozenset[str] = frozenset()

    def of(self, canonical: str) -> str | None:
        """Return the file's name of a canonical one, None where the kind of file has no such tensor."""
        layer = _LAYER.fullmatch(canonical)
        if layer is None:
            return self.names.get(canonical)
        name = self.names.get("layers.{i}." + layer[2])
        return None if name is None else name.replace("{i}", layer[1])

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of the file may be left unread."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


class Checkpoint:
    """Everything a backend needs of a model's files.

    Attributes:
        config: the decoder description.
    """

    def __init__(self, config: DecoderConfig, store: TensorStore, layout: TensorNames) -> None:
        self.config = config
        self._store = store
        self._layout = layout
        self._shapes = expected_tensors(config)

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors, first to last layer.

        ``embed``, ``layers.{i}.`` with ``attn_norm``, ``q``, ``k``, ``v``, ``o``, ``mlp_norm``, ``gate``, ``up``,
        ``down`` (and ``*_bias``, ``q_norm``, ``k_norm`` where the config says so), ``final_norm``, and ``lm_head``
        where embeddings are not tied.
        """
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, matrices as [out, in]."""
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor: on the CPU, in the file's type, quantized ones as float32.

        Raises:
            KeyError: the name is not one of ``names()``.
            CheckpointError: the tensor is missing or its data cannot be read.
        """
        tensor = self._store.read(self._file_name(name))
        part = name.rpartition(".")[2].removesuffix("_bias")
        if part in self._layout.interleaved:
            return _halves(tensor, self.config.head_dim)
        return tensor.reshape(self._shapes[name])

    @property
    def dtype(self) -> str:
        """Return the type of most parameters: float32, bfloat16 or float16; float32 for quantized files."""
        counts: dict[str, int] = {}
        for name, shape in self._shapes.items():
            dtype = self._store.tensors[self._file_name(name)].dtype
            counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
        most = max(counts, key=lambda dtype: counts[dtype])
        return most if most in TORCH_DTYPES else "float32"

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that the parameters take in the files."""
        return sum(self._store.tensors[self._file_name(name)].nbytes for name in self._shapes)

    def validate(self) -> None:
        """Check from the headers that each tensor is there with its shape, and no other.

        Raises:
            CheckpointError: naming the file, the tensor and what to do.
        """
        used = set()
        for name, shape in self._shapes.items():
            stored_name = self._file_name(name)
            used.add(stored_name)
            stored = self._store.tensors[stored_name]
            if stored.shape != shape:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored_name} has shape {list(stored.shape)}, but the model's config asks "
                    f"for {list(shape)}; config and weights are of different models, fetch both again"
                )
        for stored_name, stored in self._store.tensors.items():
            if stored_name not in used and not self._may_skip(stored_name):
                raise CheckpointError(
                    f"{stored.file}: tensor {stored_name} is not part of architecture {self.config.architecture!r} as "
                    "the config describes it; running without it would give wrong answers, so check that config and "
                    "weights belong together"
                )

    def _file_name(self, canonical: str) -> str:
        if canonical not in self._shapes:
            raise KeyError(canonical)
        name = self._layout.of(canonical)
        if name is None or name not in self._store.tensors:
            raise CheckpointError(
                f"{self._store.where} has no tensor {name or canonical}, which the model's config asks for; "
                "the checkpoint is incomplete, fetch it again"
            )
        return name

    def _may_skip(self, stored_name: str) -> bool:
        tied_head = self.config.tie_embeddings and stored_name == self._layout.names.get("lm_head")
        return tied_head or self._layout.ignores(stored_name)


def _halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows [heads * head_dim, ...] from rotary pairs to rotary halves, head by head."""
    rest = tensor.shape[1:]
    return tensor.reshape(-1, head_dim // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape).contiguous()
