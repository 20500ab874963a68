"""How busy the host keeps a device: chat-like requests on a pretended device, with and without logprobs, values read.

A step of the pretended device takes a fixed time, and some for each row and each prompt token; the defaults are a small
model's on a fast GPU. Launching gives up the interpreter as often as CUDA calls do. The faster the device, the more the
event loop bounds: then the device idles between steps, and that share is what counts. Pieces: how many the readers
got; fewer than tokens where the host fell behind and they came together. Objects are what a program has loaded beside:
full garbage collections look at all of them, unless they are frozen.

    python benchmarks/bench_host.py [--speeds 1,2,3] [--requests 1000] [--rows 256] [--repeats 3] [--objects 0]
        [--frozen]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np
from record import keep

import slotline
from slotline.backend import ALL_PARAMS, BackendEntry, BackendInfo, Capabilities
from slotline.hookspecs import hookimpl
from slotline.manager import PluginManager
from slotline.plan import LogprobColumns, StepPlan, StepResult
from slotline.plugins.echo import open_model

STEP, ROW, PROMPT = 0.45e-3, 3.7e-6, 1.1e-6  # seconds of a step, of each row in it, of each further token, at speed 1
CALLS, PER_CALL = 10, 8e-6  # of a launch: calls that give up the interpreter, and seconds of Python before each
WIDTHS = {None: "plain", 5: "logprobs5"}


@dataclass
class Handle:
    """A launched step and when it ends."""

    outcome: StepResult
    end: float

    def ready(self) -> bool:
        """Tell whether it is over."""
        return time.perf_counter() >= self.end

    def result(self) -> StepResult:
        """Wait for its end."""
        while (left := self.end - time.perf_counter()) > 0:
            time.sleep(left)
        return self.outcome


class PretendedDevice:
    """Random tokens after the right time; one step computes after the other."""

    capabilities = Capabilities(
        logprobs=True, max_logprobs=20, logprobs_modes=("raw",), params=ALL_PARAMS, block_sizes=(64,), pipeline_depth=2
    )

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.busy = self.free_at = 0.0
        self._nowhere = os.open(os.devnull, os.O_WRONLY)

    @hookimpl
    def slotline_register_backends(self, register):
        """Register it."""
        register(BackendEntry(name="pretended", create=lambda: self, open_model=open_model))

    def load(self, config, model):
        """Say that there is room for everything."""
        self._width = np.full(config.max_slots, -1)
        self._random = np.random.default_rng(0)
        return BackendInfo(
            num_blocks=8192, block_size=64, bytes_per_block=0, max_model_len=2048, vocab_size=256, batch_tokens=8192
        )

    def launch(self, plan: StepPlan) -> Handle:
        """Begin a step when the one before is over."""
        for setup in plan.admitted:
            self._width[setup.row] = setup.logprobs
        result = self._result(plan)
        for _ in range(CALLS):
            until = time.thread_time() + PER_CALL
            while time.thread_time() < until:
                pass
            os.write(self._nowhere, b"x")
        now = time.perf_counter()
        took = (STEP + ROW * len(plan) + PROMPT * (plan.num_tokens - len(plan))) / self.speed
        self.busy += took
        self.free_at = max(now, self.free_at) + took
        return Handle(result, self.free_at)

    def _result(self, plan: StepPlan) -> StepResult:
        rows, sampled, random_ = len(plan), plan.sample, self._random
        asked = np.maximum(self._width[plan.rows][sampled], -1) + 1
        indptr = np.concatenate([[0], np.cumsum(asked)]).astype(np.int32)
        count, logprobs = int(indptr[-1]), None
        if count:
            values = -random_.random(count, np.float32)
            ids = random_.integers(0, 128, count, np.int32)
            logprobs = LogprobColumns(indptr, ids, values, np.ones(count, np.int32))
        tokens = random_.integers(33, 126, (rows, 1), np.int32)
        status = np.zeros(rows, np.int8)
        return StepResult(plan.step_id, plan.rows, plan.epoch, tokens, sampled.astype(np.int32), status, logprobs)

    def release(self, rows):
        """Do nothing."""

    def close(self):
        """Do nothing."""


def lengths(count: int) -> list[tuple[int, int]]:
    """Return (prompt tokens, answer tokens) as in chats: log-normal, means near 220 and 200."""
    source = random.Random(1)

    def drawn(mean: float, spread: float) -> int:
        return max(4, min(1024, int(source.lognormvariate(mean, spread))))

    return [(drawn(4.8, 1.1), drawn(4.87, 0.95)) for _ in range(count)]


async def measure(device: PretendedDevice, engine: slotline.Engine, work: list[tuple[int, int]], width: int | None):
    """Return (seconds, share of them that the device idled, pieces)."""

    async def one(prompt: int, answer: int) -> int:
        params = slotline.SamplingParams(temperature=0.7, max_tokens=answer, ignore_eos=True, logprobs=width)
        tokens = pieces = values = 0
        async for piece in engine.stream([65] * prompt, params):
            tokens, pieces = tokens + len(piece.token_ids), pieces + 1
            if width is not None:
                values += sum(len(row) for row in piece.logprobs)
        assert tokens == answer and (width is None or values >= answer), "something is missing"
        return pieces

    device.busy = device.free_at = 0.0
    began = time.perf_counter()
    pieces = await asyncio.gather(*(one(prompt, answer) for prompt, answer in work))
    spent = time.perf_counter() - began
    return spent, 1 - device.busy / spent, sum(pieces)


async def run(speed: float, options: argparse.Namespace) -> dict:
    """Return the row of one speed."""
    device, work = PretendedDevice(speed), lengths(options.requests)
    manager = PluginManager("")
    manager.register(device, "pretended")
    config = {"max_slots": options.rows, "max_queue": 4096, "prefix_caching": False, "max_batch_tokens": 8192}
    found: dict[int | None, list[tuple[float, float, int]]] = {width: [] for width in WIDTHS}
    async with slotline.Engine.open("pretended", backend="pretended", manager=manager, **config) as engine:
        await measure(device, engine, work[:64], None)
        for _ in range(options.repeats):
            for width in WIDTHS:
                found[width].append(await measure(device, engine, work, width))
    row = {"bench": "host", "speed": speed, "requests": options.requests, "rows": options.rows}
    row |= {"tokens": sum(answer for _, answer in work), "objects": options.objects, "frozen": options.frozen}
    for width, name in WIDTHS.items():
        row[f"{name}_s"], row[f"{name}_idle"], row[f"{name}_pieces"] = (
            round(statistics.median(column), 3) for column in zip(*found[width], strict=True)
        )
        row[f"{name}_runs_s"] = [round(seconds, 3) for seconds, *_ in found[width]]
    row["ratio"] = round(row["plain_s"] / row["logprobs5_s"], 3)
    return row


def main() -> None:
    """Print a line and a row for each speed, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", default="1,2,3", help="how many times as fast the device is")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--objects", type=int, default=0)
    parser.add_argument("--frozen", action="store_true")
    options = parser.parse_args()
    rows, loaded = [], [{number: []} for number in range(options.objects // 2)]
    if options.frozen:
        gc.collect()
        gc.freeze()
    for speed in map(float, options.speeds.split(",")):
        rows.append(row := asyncio.run(run(speed, options)))
        print(
            f"speed {speed:g}: {row['plain_s']} s, device idle {row['plain_idle']:.0%}, {row['plain_pieces']} pieces; "
            f"with 5 logprobs {row['logprobs5_s']} s, {row['logprobs5_idle']:.0%}, {row['logprobs5_pieces']}"
        )
        print("ROW " + json.dumps(row), flush=True)
    del loaded
    keep(rows, "host")


if __name__ == "__main__":
    main()
