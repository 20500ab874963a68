"""slotline: an LLM inference and serving engine, an async microkernel with plugins."""

__version__ = "0.1.0"

if __name__ != "slotline":
    raise ImportError("this folder is the root of the package slotline: install it and `import slotline`")

from slotline.config import EngineConfig as EngineConfig
from slotline.errors import SlotlineError as SlotlineError
from slotline.params import SamplingParams as SamplingParams
