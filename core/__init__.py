"""slotline: an LLM inference and serving engine, an async microkernel with plugins."""

__version__ = "0.1.0"

if __name__ != "slotline":
    raise ImportError("this folder is the root of the package slotline: install it and `import slotline`")

from slotline.backend import Backend, BackendEntry, BackendInfo, Capabilities
from slotline.config import EngineConfig
from slotline.engine import Engine, Health
from slotline.errors import SlotlineError
from slotline.handle import RequestHandle
from slotline.hookspecs import hookimpl
from slotline.logprobs import Logprobs
from slotline.offline import Pipeline, SlotlineWarning, pipeline
from slotline.params import SamplingParams
from slotline.request import Completion, Notice, Output, Usage
from slotline.scoring import Score
from slotline.stats import EngineStats

__all__ = [
    "Backend",
    "BackendEntry",
    "BackendInfo",
    "Capabilities",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Health",
    "Logprobs",
    "Notice",
    "Output",
    "Pipeline",
    "RequestHandle",
    "SamplingParams",
    "Score",
    "SlotlineError",
    "SlotlineWarning",
    "Usage",
    "hookimpl",
    "pipeline",
]
