"""What the parts of the conformance suite share: which backend, which model, how to load it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from slotline.backend import Capabilities
from slotline.config import EngineConfig
from slotline.loading import open_model
from slotline.manager import PluginManager
from slotline.model import Model
from slotline.testing.steps import StepDriver

TEXT = "The quick brown fox jumps over the lazy dog. "


class Conformance:
    """Base of the suites: name the backend, and options of its engine, on the class line or in the body."""

    backend: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, *, backend: str | None = None, **options: Any) -> None:
        super().__init_subclass__()
        if backend is not None:
            cls.backend = backend
        cls.options = {**cls.options, **options}

    @pytest.fixture
    def model(self) -> str:
        """Return the model to run: the option of that name, or the backend's own. Override it to make one."""
        return str(self.options.get("model", self.backend))

    @pytest.fixture
    def capabilities(self) -> Capabilities:
        """Return what the backend declares before it is loaded."""
        manager = PluginManager()
        try:
            return manager.backend(self.backend).create().capabilities
        finally:
            manager.close()

    def config(self, model: str, **options: Any) -> EngineConfig:
        """Return a small engine's configuration."""
        small = {"backend": self.backend, "max_slots": 4, "kv_cache_tokens": 4096, "seed": 1}
        return EngineConfig.of(**{**small, **self.options, "model": model, **options})

    @contextmanager
    def loaded(self, model: str, **options: Any) -> Iterator[tuple[StepDriver, Model]]:
        """Load the backend without an engine and close it afterwards."""
        config, manager = self.config(model, **options), PluginManager()
        try:
            entry = manager.backend(self.backend)
            opened = open_model(config, manager, entry)
            backend = entry.create()
            info = backend.load(config, opened)
            try:
                yield StepDriver(backend, info), opened
            finally:
                backend.close()
        finally:
            manager.close()


def prompt_ids(model: Model, length: int) -> list[int]:
    """Return a prompt of exactly ``length`` tokens."""
    ids = model.tokenizer.encode(TEXT * length, add_special=False)
    return ids[:length]
