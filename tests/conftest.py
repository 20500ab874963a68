"""What every test may use. Markers are declared in pyproject.toml."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
