"""The contract between the core and a backend plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slotline.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from slotline.config import EngineConfig
    from slotline.model import Model

# Sampling fields a backend may honour. The ones below the line change the answer's meaning,
# so a request that gives one of them to a backend without it is refused, not warned.
SOFT_PARAMS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"}
)
HARD_PARAMS = frozenset({"stop_token_ids", "min_tokens", "logit_bias", "bad_words", "allowed_token_ids", "ignore_eos"})
ALL_PARAMS = SOFT_PARAMS | HARD_PARAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Say what a backend can do. Surfaces warn or refuse by it; nothing is silently ignored.

    Attributes:
        logprobs: sampled tokens can carry log-probabilities.
        max_logprobs: widest table per position.
        prompt_logprobs: prompt positions can, too.
        embeddings: hidden states of prompts can be had.
        logprobs_modes: of "raw", "processed".
        params: names of SamplingParams fields that are honoured.
        processors: names usable in SamplingParams.extra.
        constraints: kinds of constraint.
        quantizations, kv_dtypes, devices: names.
        block_sizes: allowed values of EngineConfig.block_size, the default first.
        pipeline_depth: steps that may be launched before the first result is fetched (1 or 2).
        deterministic: EngineConfig.deterministic is honoured.
        adapters: adapters can be selected.
    """

    logprobs: bool = False
    max_logprobs: int = 0
    prompt_logprobs: bool = False
    embeddings: bool = False
    logprobs_modes: tuple[str, ...] = ()
    params: frozenset[str] = frozenset()
    processors: frozenset[str] = frozenset()
    constraints: frozenset[str] = frozenset()
    quantizations: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    devices: tuple[str, ...] = ("cpu",)
    pipeline_depth: int = 1
    deterministic: bool = False
    adapters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What a backend says after loading; the core builds its block pool from it.

    Attributes:
        num_blocks: KV blocks, block 0 included. Block 0 is scratch and never handed out.
        block_size: tokens per block.
        bytes_per_block: over all layers.
        max_model_len: longest sequence, prompt and output, in tokens.
        vocab_size: width of the logits.
        memory_report: bytes by use, for people.
        batch_tokens: tokens to compute in one step where max_batch_tokens is not given.
        tile_tokens: a step of many tokens takes as long as whole tiles of so many; 1 = each token takes its own time.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    vocab_size: int
    memory_report: dict[str, int] = field(default_factory=dict)
    batch_tokens: int = 8192
    tile_tokens: int = 1


class StepHandle(Protocol):
    """A launched step.

    It may also have ``ready() -> bool``, which tells from any thread and without waiting whether the step is over. The
    engine then leaves the interpreter to the backend's thread, which reads the result, before it wakes further readers.
    """

    def result(self) -> StepResult:
        """Block until the step is done and return it; raise what the step raised."""


def is_ready(step: StepHandle) -> bool:
    """Tell whether a step is known to be done."""
    ready = getattr(step, "ready", None)
    return ready is not None and ready()


class Backend(Protocol):
    """Weights, KV tensors, device state per row, and the step.

    Every method but ``capabilities`` is called on one dedicated thread, in order.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Say what this backend can do; known before load."""

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        """Load weights and allocate the KV cache.

        Raises:
            ConfigError, ModelError: with one sentence that says what to do.
        """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once where the device allows it."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows that ended when no plan follows that would say so."""

    def close(self) -> None:
        """Free everything at once; idempotent. After a step that failed, another backend is made and loaded next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """A backend as registered through ``slotline_register_backends``.

    Attributes:
        name: what ``EngineConfig.backend`` selects.
        create: makes the backend; heavy imports belong inside.
        unavailable: returns why it cannot run here, or None; cheap.
        open_model: makes the model for backends that bring their own; None = the model hooks do.
        auto_priority: ``backend="auto"`` takes the available one with the highest; None = never.
        summary: one line for ``slotline plugins``.
    """

    name: str
    create: Callable[[], Backend]
    unavailable: Callable[[], str | None] = lambda: None
    open_model: Callable[[EngineConfig], Model] | None = None
    auto_priority: int | None = None
    summary: str = ""
