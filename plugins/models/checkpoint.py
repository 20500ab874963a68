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
class Fused:
    """One stored tensor of a layer that holds several of the decoder's, joined by their outputs.

    Attributes:
        name: the file's; ``{i}`` stands for the layer.
        parts: what it holds, in order, such as ``("q", "k", "v")``.
        by_kv_head: for q, k and v: for each key head its queries, its key and its value in turn, rather than all
            queries, all keys and all values.
    """

    name: str
    parts: tuple[str, ...]
    by_kv_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How one kind of file names and lays out the decoder's tensors.

    Attributes:
        names: canonical name to the file's; ``{i}`` stands for the layer.
        fused: tensors that hold several.
        ignored: patterns of names that carry nothing a decoder needs.
        interleaved: tensors whose rotary channels are stored in pairs (2i, 2i + 1) and are put back
            into halves (i, i + head_dim / 2), with their biases.
        norms_from_one: norms are stored as their difference from one.
    """

    names: Mapping[str, str]
    fused: tuple[Fused, ...] = ()
    ignored: tuple[str, ...] = ()
    interleaved: frozenset[str] = frozenset()
    norms_from_one: bool = False

    def of(self, canonical: str) -> str | None:
        """Return the file's name of a canonical one, None where the kind of file has no such tensor."""
        layer = _LAYER.fullmatch(canonical)
        if layer is None:
            return self.names.get(canonical)
        fused = self.fusion(canonical)
        name = self.names.get("layers.{i}." + layer[2]) if fused is None else fused.name
        return None if name is None else name.replace("{i}", layer[1])

    def fusion(self, canonical: str) -> Fused | None:
        """Return the tensor that holds a layer's part beside others, None where it is on its own."""
        part = canonical.rpartition(".")[2]
        return next((fused for fused in self.fused if part in fused.parts), None)

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
        self._last: tuple[str, torch.Tensor] | None = None  # a fused tensor is read once for all its parts

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors, first to last layer.

        ``embed``, ``layers.{i}.`` with ``attn_norm``, ``q``, ``k``, ``v``, ``o``, ``mlp_norm``, ``gate``, ``up``,
        ``down`` (and ``*_bias``, ``q_norm``, ``k_norm``, ``attn_post_norm``, ``mlp_post_norm`` where the config says
        so), ``final_norm``, and ``lm_head`` where embeddings are not tied.
        """
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, matrices as [out, in]."""
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor: on the CPU, in the file's type, quantized ones as float32.

        Raises:
            KeyError: the name is not one of ``names()``.
            CheckpointError: the tensor is missing, its data cannot be read, or it holds NaN or infinity.
        """
        stored = self._file_name(name)
        fused = self._layout.fusion(name)
        tensor = self._read(stored) if fused is None else self._part(fused, stored, name)
        part = name.rpartition(".")[2].removesuffix("_bias")
        if self._layout.norms_from_one and part.endswith("norm"):
            tensor = tensor.float() + 1.0
        if part in self._layout.interleaved:
            return _halves(tensor, self.config.head_dim, self.config.rotary_dim)
        return tensor.reshape(self._shapes[name])

    def _read(self, stored_name: str) -> torch.Tensor:
        """Read a stored tensor; NaN would spread to every answer, long after the cause could be found."""
        tensor = self._store.read(stored_name)
        # A sum shows both, and costs a fraction of looking at each value. It may overflow: then each is looked at.
        if tensor.is_floating_point() and not tensor.sum(dtype=_wide(tensor)).isfinite():
            bad = int((~tensor.isfinite()).sum())
            if bad:
                raise CheckpointError(
                    f"{self._store.tensors[stored_name].file}: tensor {stored_name} holds {bad} values that are NaN "
                    "or infinite; the file is damaged or was saved from a training run that diverged"
                )
        return tensor

    def _part(self, fused: Fused, stored_name: str, name: str) -> torch.Tensor:
        """Cut one of the decoder's tensors out of a fused one."""
        if self._last is None or self._last[0] != stored_name:
            self._last = (stored_name, self._read(stored_name))
        tensor, prefix = self._last[1], name.rpartition(".")[0]
        rows = [self._shapes[f"{prefix}.{part}"][0] for part in fused.parts]
        at = fused.parts.index(name.rpartition(".")[2])
        if at == len(rows) - 1:
            self._last = None
        groups = self.config.num_kv_heads if fused.by_kv_head else 1
        start = sum(rows[:at]) // groups
        cut = tensor.reshape(groups, -1, *tensor.shape[1:])[:, start : start + rows[at] // groups]
        return cut.reshape(self._shapes[name]).clone()

    @property
    def dtype(self) -> str:
        """Return the type of most parameters: float32, bfloat16 or float16; float32 for quantized files."""
        counts: dict[str, int] = {}
        for name, shape in self._stored_shapes().items():
            dtype = self._store.tensors[name].dtype
            counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
        most = max(counts, key=lambda dtype: counts[dtype])
        return most if most in TORCH_DTYPES else "float32"

    @property
    def stored_types(self) -> dict[str, int]:
        """Return how many bytes the parameters take in the files, by type, the most first."""
        sizes: dict[str, int] = {}
        for name in self._stored_shapes():
            stored = self._store.tensors[name]
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.nbytes
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that the parameters take in the files."""
        return sum(self.stored_types.values())

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each stored tensor ought to have.

        Raises:
            CheckpointError: one is missing.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self._shapes.items():
            stored = self._file_name(name)
            before = shapes.get(stored)
            shapes[stored] = shape if before is None else (before[0] + shape[0], *shape[1:])
        return shapes

    def validate(self) -> None:
        """Check from the headers that each tensor is there with its shape, and no other.

        Raises:
            CheckpointError: naming the file, the tensor and what to do.
        """
        shapes = self._stored_shapes()
        for stored_name, shape in shapes.items():
            stored = self._store.tensors[stored_name]
            if stored.shape != shape:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored_name} has shape {list(stored.shape)}, but the model's config asks "
                    f"for {list(shape)}; config and weights are of different models, fetch both again"
                )
        for stored_name, stored in self._store.tensors.items():
            if stored_name not in shapes and not self._may_skip(stored_name):
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


def _wide(tensor: torch.Tensor) -> torch.dtype:
    import torch

    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _halves(tensor: torch.Tensor, head_dim: int, rotary_dim: int | None) -> torch.Tensor:
    """Reorder rows [heads * head_dim, ...] from rotary pairs to rotary halves, head by head."""
    import torch

    dim, rest = rotary_dim or head_dim, tensor.shape[1:]
    heads = tensor.reshape(-1, head_dim, *rest)
    turning = heads[:, :dim].reshape(-1, dim // 2, 2, *rest).transpose(1, 2).reshape(-1, dim, *rest)
    return torch.cat([turning, heads[:, dim:]], 1).reshape(tensor.shape)
