"""Before serving: find out what a step needs of memory, and run once whatever no recording holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slotline.kernels.row_layout import PAGE
from slotline.params import SamplingParams
from slotline.plan import NO_LOGPROBS, RowSetup, StepPlan
from slotline.plugins.triton_backend.attention import LONG
from slotline.plugins.triton_backend.decoder import Decoder
from slotline.plugins.triton_backend.graphs import MOST_TOKENS
from slotline.plugins.triton_backend.inputs import Layout
from slotline.plugins.triton_backend.rows import to_device
from slotline.plugins.triton_backend.runner import Runner
from slotline.plugins.triton_backend.sampling import COLUMNS, WIDE, Kind, choose


def scratch_bytes(decoder: Decoder, tokens: int) -> int:
    """Return the bytes that a step of so many tokens takes for a while, sampling with logprobs included."""
    state, slots = decoder.state, len(decoder.state) - 1
    device = state.device
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    layout = Layout.of(slots, tokens, chunks=True)
    columns = layout.split(to_device(layout.blank.copy(), device))
    hidden = decoder.hidden(columns, 0 if decoder.exact else slots)
    logits = decoder.logits(hidden[columns.picks])
    choose(Kind.LOGPROBS, logits, state, columns.slots, columns.following)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def warm_up(runner: Runner, *, slots: int, longest: int, batch_tokens: int, blocks: int) -> None:
    """Launch steps of every kind that is not recorded, so that nothing is compiled while serving."""
    length = min(longest - 2, batch_tokens - 1, (blocks - 1) * PAGE)
    some = min(slots, 3)
    trials: list[dict[str, Any]] = [
        {"presence_penalty": 0.5, "logprobs": WIDE},
        {"logit_bias": {1: 1.0}, "logprobs": 1, "logprobs_mode": "processed", "temperature": 0.7, "top_k": 5},
        {"logprobs": WIDE},
    ]
    for options in trials:
        setups = [_setup(slot, 4, **options) for slot in range(some)]
        _run(runner, setups, [0] * some, admitted=setups)
        _run(runner, setups, [4] * some, counts=[1] * some)
    for width in (1, COLUMNS + 1):
        scored = [_setup(slot, 4, prompt_logprobs=width) for slot in range(some)]
        _run(runner, scored, [0] * some, admitted=scored)
    if length > max(MOST_TOKENS, LONG) and slots > 1:
        long = _setup(0, length)
        _run(runner, [long], [0], admitted=[long])
        other = _setup(1, 4)
        _run(runner, [other], [0], admitted=[other])
        again = _setup(0, length)
        _run(runner, [other, again], [4, 0], counts=[1, length], admitted=[again])
        part = _setup(0, length)
        _run(runner, [part], [0], counts=[PAGE], admitted=[part])
        if length - PAGE > MOST_TOKENS:
            _run(runner, [part], [PAGE], counts=[length - PAGE])
    runner.rows.release(range(slots))


def _setup(slot: int, length: int, **options: Any) -> RowSetup:
    """Return a request of ``length`` tokens that no stop id ends."""
    params = SamplingParams(**{"max_tokens": 2, **options})
    return RowSetup(
        row=slot,
        epoch=0,
        params=params.resolved({}),
        seed=0,
        token_ids=np.zeros(length, np.int32),
        prompt_len=length,
        stop_ids=(),
        min_len=length,
        max_len=length + 2,
        logprobs=NO_LOGPROBS if params.logprobs is None else params.logprobs,
        prompt_logprobs=NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def _run(
    runner: Runner,
    setups: Sequence[RowSetup],
    starts: Sequence[int],
    *,
    counts: Sequence[int] | None = None,
    admitted: Sequence[RowSetup] = (),
) -> None:
    """Run one step; rows share blocks 1, 2, ..., whose content is not wanted."""
    counts = [len(s.token_ids) for s in setups] if counts is None else counts
    pages = [-(-len(s.token_ids) // PAGE) if s in admitted else 0 for s in setups]
    plan = StepPlan(
        step_id=0,
        rows=np.array([s.row for s in setups], np.int32),
        epoch=np.zeros(len(setups), np.int64),
        start=np.array(starts, np.int32),
        count=np.array(counts, np.int32),
        token_ids=np.zeros(sum(counts), np.int32),
        block_indptr=np.cumsum([0, *pages]).astype(np.int32),
        block_ids=np.concatenate([np.arange(1, n + 1) for n in pages]).astype(np.int32),
        sample=np.ones(len(setups), np.bool_),
        admitted=tuple(admitted),
    )
    runner.launch(plan).result()
