"""A test kit for packages that extend slotline, and its pytest plugin.

In ``conftest.py``, so that failing assertions of the kit show their values::

    pytest_plugins = ["slotline.testing"]

and in a test file, the whole conformance suite in one line::

    class TestReverse(BackendConformance, backend="reverse"): "All that slotline expects of a backend."

The suite asks the backend for what it declares in its ``Capabilities`` and skips the rest. Further
keywords on the class line are engine options; a backend that needs a model made first overrides
the fixture ``model``. One for backends that read checkpoints comes with the plugin: ``tiny_llama``.

PYTEST_DONT_REWRITE: nothing asserts in this file, which a test module may import before pytest sees
it as a plugin. Those that assert are registered for rewriting below.
"""

import pytest

_SUITES = ("base", "engine_suite", "schedule_suite", "step_suite", "steps", "tiny")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _SUITES))

from slotline.testing.base import Conformance as Conformance  # noqa: E402 - after the lines above
from slotline.testing.engine_suite import AnswerConformance, CapabilityConformance  # noqa: E402
from slotline.testing.schedule_suite import ScheduleConformance  # noqa: E402
from slotline.testing.step_suite import StepConformance  # noqa: E402
from slotline.testing.steps import StepDriver as StepDriver  # noqa: E402
from slotline.testing.steps import Work as Work  # noqa: E402
from slotline.testing.steps import check_result as check_result  # noqa: E402
from slotline.testing.tiny import tiny_llama as tiny_llama  # noqa: E402
from slotline.testing.tiny import write_tiny_llama as write_tiny_llama  # noqa: E402


class BackendConformance(StepConformance, AnswerConformance, CapabilityConformance, ScheduleConformance):
    """All that slotline expects of a backend: subclass it, and name the backend."""
