"""What every test may use. Markers are declared in pyproject.toml."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from blockbuster import BlockBuster

# A shared two-core runner stalls at will: no deadlines. The default profile repeats itself, the long one explores.
_common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("default", parent=_common, max_examples=200, derandomize=True)
settings.register_profile("long", parent=_common, max_examples=5000)
settings.load_profile("default")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, the one loop that slotline promises."""
    return "asyncio"


@pytest.fixture
def no_blocking() -> Iterator["BlockBuster"]:
    """Make a blocking call from slotline's code on the event loop raise `BlockingError`."""
    from blockbuster import blockbuster_ctx

    with blockbuster_ctx(["slotline", "slotline.plugins", "slotline.apis"]) as guard:
        yield guard


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


TOPICS = (
    "The tide came in slowly and the children",
    "def fibonacci(n):",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam,",
    "The three largest cities of Japan are",
    "Once upon a time there was a clockmaker who",
    "SELECT name FROM customers WHERE",
    "In 1969 two men walked on the Moon, and",
    "A recipe for bread: first",
    "The difference between weather and climate is",
)


@pytest.fixture(scope="session")
def mixed_prompts() -> list[str]:
    """Return 20 prompts of 1 to about 300 tokens."""
    short = [topic[: 3 + 5 * i].strip() for i, topic in enumerate(TOPICS)]
    return short + [" ".join(TOPICS[i:] + TOPICS[:i]) * (1 + i // 4) + topic for i, topic in enumerate(TOPICS)]


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """Return SmolLM2 in transformers, read by its own GGUF loader, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from slotline import EngineConfig
    from slotline.manager import PluginManager

    manager = PluginManager("")
    manager.hook.slotline_open_model(config=EngineConfig(), manager=manager)
    sources = manager.registry("model_sources").values()
    folder = next(Path(c.path) for s in sources for c in s.list_cached() if c.name == "smollm2-135m")
    (file,) = folder.rglob("*.gguf")
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
