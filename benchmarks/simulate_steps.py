"""Run the scheduler through a chat's thousand requests without a device: each step takes what measurements say.

Products take the library's times of a 7B model on an H200 (`results/20261130T182400Z-06ace35-products.json`), attention
its bytes, and the other kernels what they took in profiles; steps of the same sizes on the device agree within
a few percent, except at 250 rows, where they take a millisecond more. For comparing policies, not for predicting a row.

    python benchmarks/simulate_steps.py [--tiles 1,64,128] [--requests 1000] [--rows 256]
"""

from __future__ import annotations

import argparse
import ast
import bisect
import json
import re
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from bench_host import lengths
from record import RESULTS, keep

from slotline import SamplingParams
from slotline.blocks import BlockPool
from slotline.plan import StepPlan, StepResult
from slotline.plugins.triton_backend.graphs import DECODE_SIZES, TOKEN_SIZES, size_for
from slotline.queue import RequestQueue
from slotline.request import SequenceRequest
from slotline.scheduler import Scheduler

PRODUCTS = RESULTS / "20261130T182400Z-06ace35-products.json"
LAYERS, WEIGHTS = 32, ("qkv", "o", "gu", "down")
KEY_BYTES, BANDWIDTH = 131072, 4.1e9  # of a key and value over all layers; bytes per millisecond


def product_times() -> dict[int, float]:
    """Return milliseconds of all layers' products by rows; a size never costs more than the next larger one."""
    total: dict[int, float] = {}
    for row in json.loads(PRODUCTS.read_text(encoding="utf-8"))["rows"]:
        found = re.match(r"BLAS 7b\.(\w+) (\[.*)", row)
        if found and found[1] in WEIGHTS:
            for rows, microseconds in ast.literal_eval(found[2]):
                total[rows] = total.get(rows, 0.0) + microseconds * LAYERS / 1e3
    best = float("inf")
    for rows in sorted(total, reverse=True):
        best = total[rows] = min(best, total[rows])
    return total


@dataclass
class Cost:
    """Milliseconds of steps, and what was gathered of them."""

    products: dict[int, float] = field(default_factory=product_times)
    steps: list[tuple[float, int]] = field(default_factory=list)  # (milliseconds, rows)
    padding: int = 0

    def of(self, plan: StepPlan) -> float:
        """Return what a step takes."""
        single = plan.count == 1
        prompt, keys = int(plan.count[~single].sum()), int(plan.start[single].sum())
        size = size_for(plan.num_tokens, TOKEN_SIZES if prompt else DECODE_SIZES)
        if size is None:  # it is not recorded
            size = -(-plan.num_tokens // 64) * 64
        other = 0.19 if len(plan) <= 128 else 0.27  # logits and sampling
        other += LAYERS * (7.5e-3 + size * 36e-6) + (0.66 + LAYERS * 8e-3 + prompt * 2.5e-3 if prompt else 0.26)
        took = self._product(size) + keys * KEY_BYTES / BANDWIDTH + LAYERS * 6e-3 + other
        self.steps.append((took, len(plan)))
        self.padding += size - plan.num_tokens
        return took

    def _product(self, rows: int) -> float:
        sizes = sorted(self.products)
        if rows > sizes[-1]:
            return self.products[sizes[-1]] * rows / sizes[-1]
        return self.products[sizes[bisect.bisect_left(sizes, rows)]]


def simulate(work: list[tuple[int, int]], rows: int, tile: int) -> dict:
    """Return the row of one tile size: two steps in flight, as on the device."""
    pool, cost = BlockPool(20000, 64, prefix_caching=False), Cost()
    scheduler = Scheduler(rows, 16384, 8192, pool, RequestQueue(len(work) + rows), tile)
    params = SamplingParams(ignore_eos=True)
    for i, (prompt, answer) in enumerate(work):
        ids = np.zeros(prompt, np.int32)
        scheduler.add([SequenceRequest(i, ids, params, seed=0, stop_ids=(), max_tokens=answer)])
    now, first, flying = 0.0, dict[int, float](), deque[tuple[StepPlan, float]]()
    while True:
        while len(flying) < 2 and (plan := scheduler.schedule()) is not None:
            scheduler.apply(plan)
            flying.append((plan, cost.of(plan)))
        if not flying:
            break
        plan, took = flying.popleft()
        now += took
        one, status = plan.sample.astype(np.int32), np.zeros(len(plan), np.int8)
        batch = scheduler.commit(StepResult(plan.step_id, plan.rows, plan.epoch, one[:, None], one, status))
        for seq_id in batch.seq_ids.tolist():
            first.setdefault(seq_id, now)
    gaps = sorted(took for took, count in cost.steps for _ in range(count))
    return {
        "bench": "simulated-steps",
        "tile": tile,
        "seconds": round(now / 1e3, 3),
        "steps": len(cost.steps),
        "padding": cost.padding,
        "mean_first_token_s": round(float(np.mean(list(first.values()))) / 1e3, 3),
        **{f"gap_p{p}_ms": round(gaps[len(gaps) * p // 100], 1) for p in (50, 90, 95, 99)},
    }


def main() -> None:
    """Print a row for each tile size, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", default="1,64,128")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256)
    options = parser.parse_args()
    work = lengths(options.requests)
    rows = [simulate(work, options.rows, int(tile)) for tile in options.tiles.split(",")]
    for row in rows:
        print("ROW " + json.dumps(row))
    keep(rows, "simulated-steps")


if __name__ == "__main__":
    main()
