"""Time each op of `slotline.kernels` on a GPU, in a CUDA graph, beside the time that its bytes take.

The floor counts what an op must move through device memory, each byte once, at the bandwidth that a large copy reaches
on this card. Inputs rotate: large ones do not sit in the L2 cache; small ones do, as after the matrix product
that made them. The ops are checked against their references first. The last line is JSON.

    python benchmarks/bench_kernels.py [--rows 1 64 256] [--vocab 92544 151936] [--repeats 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

CACHE = 1 << 28  # bytes that must pass between two uses of an input
INF = math.inf


@dataclass(frozen=True)
class Result:
    """One op at one size: median time, the bytes it must move, and what share of the copy's bandwidth that makes."""

    op: str
    rows: int
    vocab: int
    us: float
    floor_us: float
    gb_per_s: float
    share: float


def graph_time(calls: list[Callable[[], object]], repeats: int) -> float:
    """Return the median microseconds of one call: all of them captured in one graph, one after the other."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


def copy_bandwidth(repeats: int) -> float:
    """Return bytes per microsecond, read and written, of a kernel that copies 2 GB with the sign changed."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / graph_time([lambda: torch.neg(source, out=target)], repeats)


class Inputs:
    """What the ops work on at one size: several sets of logits, and per-row columns."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.rows, self.vocab = rows, vocab
        self.sets = max(2, -(-CACHE // (4 * rows * vocab)))
        self.sets = min(self.sets, 64)
        rng = torch.Generator(device="cuda").manual_seed(rows + vocab)
        shape = (self.sets, rows, vocab)
        self.logits = torch.randn(shape, device="cuda", generator=rng) * 2.5
        heads = torch.randint(vocab, (self.sets, rows, 40), device="cuda", generator=rng)
        peaks = 12 + 3 * torch.randn(self.sets, rows, 40, device="cuda", generator=rng)
        self.logits.scatter_(2, heads, peaks)  # a few likely tokens over a long tail, as models give
        self.seeds = torch.randint(2**62, (rows,), device="cuda", generator=rng)
        self.positions = torch.randint(4096, (rows,), device="cuda", generator=rng)
        self.lines = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.tokens = heads[0, :, 0].int().contiguous()
        self.masks = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device="cuda", generator=rng).int()
        self.seen = torch.zeros(rows, vocab, dtype=torch.int32, device="cuda")
        self.seen.scatter_(1, torch.randint(vocab, (rows, 600), device="cuda", generator=rng), 3)
        self.indptr = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * 8
        self.ids = torch.randint(vocab, (rows * 8,), device="cuda", generator=rng).int()

    def full(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one value a row."""
        return torch.full((self.rows,), value, dtype=dtype, device="cuda")


def ops(inputs: Inputs) -> dict[str, tuple[Callable[[Tensor], object], float]]:
    """Return each op as a function of logits, and how many times the logits' bytes it must move."""
    from slotline.kernels.add_bias import add_bias
    from slotline.kernels.argmax import argmax
    from slotline.kernels.ban_ids import ban_ids
    from slotline.kernels.drop_rest import drop_rest
    from slotline.kernels.logsumexp import logsumexp
    from slotline.kernels.mask_allowed import mask_allowed
    from slotline.kernels.penalise import penalise
    from slotline.kernels.philox import philox_uniform
    from slotline.kernels.sample import sample
    from slotline.kernels.top_logprobs import top_logprobs

    i = inputs
    some = i.full(0.1)
    longs = {"keys": i.full(0x80000000, torch.int64), "ids": i.full(i.vocab, torch.int32)}

    def draw(temperature: float, top_k: int, top_p: float) -> Callable[[Tensor], object]:
        columns = (i.full(temperature), i.full(-INF), i.full(top_k, torch.int32), i.full(top_p))
        return lambda x: sample(x, *columns, i.seeds, i.positions)

    def table(width: int, lines: Tensor) -> Callable[[Tensor], object]:
        widths = i.full(width, torch.int32)
        return lambda x: top_logprobs(x, lines, i.tokens, widths, width)

    nobody = i.full(-1, torch.int32)
    return {
        "philox": (lambda x: philox_uniform(i.seeds, i.positions), 0.0),
        "argmax": (argmax, 1.0),
        "logsumexp": (logsumexp, 1.0),
        "sample, greedy": (draw(0.0, 0, 1.0), 1.0),
        "sample, T 0.7": (draw(0.7, 0, 1.0), 1.0),
        "sample, T 0.7 k 50 p 0.95": (draw(0.7, 50, 0.95), 1.0),
        "sample, T 1 p 0.95": (draw(1.0, 0, 0.95), 1.0),
        "sample, T 1 k 1000": (draw(1.0, 1000, 1.0), 1.0),
        "sample, T 5 p 0.9 (walk)": (draw(5.0, 0, 0.9), 1.0),
        "top_logprobs, N 0": (table(0, i.lines), 1.0),
        "top_logprobs, N 5": (table(5, i.lines), 1.0),
        "top_logprobs, N 20": (table(20, i.lines), 1.0),
        "top_logprobs, N 1024": (table(1024, i.lines), 1.0),
        "top_logprobs, N 5, no rows": (table(5, nobody), 0.0),
        "torch: argmax": (lambda x: x.argmax(-1), 1.0),
        "torch: log_softmax, topk 20": (lambda x: torch.log_softmax(x, -1).topk(20), 1.0),
        "torch: sort": (lambda x: x.sort(-1), 1.0),
        # These change the logits.
        "mask_allowed": (lambda x: mask_allowed(x, i.masks, i.lines), 2.0 + 1 / 32),
        "mask_allowed, no rows": (lambda x: mask_allowed(x, i.masks, nobody), 0.0),
        "ban_ids, 8 a row": (lambda x: ban_ids(x, i.indptr, i.ids), 0.0),
        "add_bias, 8 a row": (lambda x: add_bias(x, i.indptr, i.ids, i.ids.float()), 0.0),
        "penalise, 600 seen": (lambda x: penalise(x, i.seen, i.lines, some + 1, some, some), 1.0),
        "penalise, no rows": (lambda x: penalise(x, i.seen, nobody, some + 1, some, some), 0.0),
        "drop_rest": (lambda x: drop_rest(x, i.lines, some + 0.6, longs["keys"], longs["ids"]), 2.0),
    }


def check(inputs: Inputs) -> None:
    """Hold the ops that this measures against their references, on a few rows."""
    from slotline.kernels.reference import sample as sample_reference
    from slotline.kernels.reference import top_logprobs as top_reference
    from slotline.kernels.sample import sample
    from slotline.kernels.top_logprobs import top_logprobs

    few = min(4, inputs.rows)
    x, lines, tokens = inputs.logits[0, :few], inputs.lines[:few], inputs.tokens[:few]
    for width in (5, min(1024, inputs.vocab)):
        entry = (x, lines, tokens, torch.full_like(lines, width), width)
        ours, expected = top_logprobs(*entry), top_reference.top_logprobs(*entry)
        assert torch.equal(ours.ids, expected.ids) and torch.equal(ours.ranks, expected.ranks)
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-5, atol=1e-5)
    columns = [inputs.full(v)[:few] for v in (0.7, -INF)]
    rest = (inputs.full(50, torch.int32)[:few], inputs.full(0.95)[:few], inputs.seeds[:few], inputs.positions[:few])
    assert torch.equal(sample(x, *columns, *rest).cut_ids, sample_reference.sample(x, *columns, *rest).cut_ids)


def measure(rows: int, vocab: int, bandwidth: float, repeats: int) -> list[Result]:
    """Time every op at one size."""
    inputs = Inputs(rows, vocab)
    check(inputs)
    found = []
    for name, (op, times) in ops(inputs).items():
        if name == "torch: sort" and rows * vocab > 1 << 24:
            continue  # its result alone would be gigabytes a set
        calls: list[Callable[[], object]] = [lambda x=x, op=op: op(x) for x in inputs.logits]  # type: ignore[misc]
        us = graph_time(calls, repeats)
        moved = 4.0 * rows * vocab * times
        floor = moved / bandwidth
        found.append(Result(name, rows, vocab, us, floor, moved / us / 1000, floor / us))
        print(f"{rows:4d} {vocab:7d}  {name:28s} {us:9.1f} us  floor {floor:7.1f}  {moved / us / 1000:7.0f} GB/s")
    return found


def main() -> None:
    """Measure all sizes and print the table and the JSON row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[92_544, 151_936])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels needs a CUDA GPU: torch sees none here")
    bandwidth = copy_bandwidth(args.repeats)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {bandwidth / 1e6:.2f} TB/s")
    results = [r for v in args.vocab for n in args.rows for r in measure(n, v, bandwidth, args.repeats)]
    row = {
        "bench": "kernels",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_s": round(bandwidth / 1000, 1),
        "results": [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in results],
    }
    if args.out:
        args.out.write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
