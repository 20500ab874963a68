"""What a format hands over: a checkpoint with its tokenizer, template, end tokens and sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slotline.config import EngineConfig
from slotline.plugins.models.architecture import Architecture
from slotline.plugins.models.checkpoint import Checkpoint
from slotline.plugins.models.tokenizer import FastTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFiles:
    """A model's files, opened but not loaded.

    Attributes:
        template: the chat template's text and where it is, None where the files have none.
        eos_ids: end tokens named by the files' configs, the tokenizer's own aside.
        generation: sampling defaults by SamplingParams name.
    """

    checkpoint: Checkpoint
    tokenizer: FastTokenizer
    template: tuple[str, str] | None = None
    eos_ids: frozenset[int] = frozenset()
    generation: Mapping[str, Any] = field(default_factory=dict)


class Format(Protocol):
    """One kind of checkpoint on disk."""

    def recognises(self, path: Path) -> bool:
        """Return whether this file or folder is of the kind, by names alone."""

    def checkpoint(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> Checkpoint:
        """Open config and weights alone.

        Raises:
            CheckpointError: something is missing, damaged or unknown.
        """

    def open(self, path: Path, config: EngineConfig, architectures: Mapping[str, Architecture]) -> OpenedFiles:
        """Open it and check its headers.

        Raises:
            CheckpointError: something is missing, damaged or unknown.
            TokenizerError: likewise, of the tokenizer.
        """
