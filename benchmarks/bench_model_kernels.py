"""Time what a transformer's step is made of on a GPU, kernel by kernel, beside what its bytes or operations take.

Each kernel runs in a CUDA graph at the shapes of two models, for several numbers of rows. Weights and caches rotate, so
that none of them sits in the L2 cache; rows are small and stay there, as in a step. A floor is the larger of the bytes
at the bandwidth of a large copy and the operations at the rate of a large product, both measured first. Whole steps of
one and of eight rows follow, without sampling.

    python benchmarks/bench_model_kernels.py [--shapes 7b 0.6b] [--rows 1 8 64 256] [--context 640] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from bench_kernels import copy_bandwidth, graph_time
from torch import Tensor
from torch.nn import functional

CACHE = 1 << 28  # bytes that must pass between two uses of a weight or a cache
PAGE = 64
LONG = 8192  # tokens of the long prompt


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of a model's kernels."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    normed: bool  # RMS norms over single heads
    dim: int = 128

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of each kind of weights."""
        flat = self.heads * self.dim
        return {
            "qkv": (flat + 2 * self.kv_heads * self.dim, self.hidden),
            "o": (self.hidden, flat),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    "7b": Shape(4096, 14336, 32, 8, 32, 92544, normed=False),
    "0.6b": Shape(1024, 3072, 16, 8, 28, 151936, normed=True),
}


@dataclass(frozen=True)
class Case:
    """One kernel: what to call, in turn on different memory, its least bytes, and its operations."""

    name: str
    calls: Sequence[Callable[[], object]]
    nbytes: float
    operations: float = 0.0


def draw(*shape: int) -> Tensor:
    """Return small bfloat16 noise."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def copies(nbytes: float) -> int:
    """Return how many sets of memory have to rotate."""
    return max(2, min(32, int(CACHE // nbytes) + 1))


def products(shape: Shape, rows: int) -> Iterator[Case]:
    """Yield matrix products, of the library and our own where there are any."""
    from slotline.kernels.gemv import gemv
    from slotline.kernels.norm_gemv import norm_gemv
    from slotline.kernels.skinny_gemm import MOST, skinny_gemm

    for name, (outer, inner) in shape.products.items():
        nbytes, operations = 2.0 * outer * inner, 2.0 * rows * outer * inner
        weights = [draw(outer, inner) for _ in range(copies(nbytes))]
        x, gain = draw(rows, inner), draw(inner)
        ways: dict[str, Callable[[Tensor], object]] = {"library": lambda w, x=x: functional.linear(x, w)}
        if rows == 1:
            ways["gemv"] = lambda w, x=x: gemv(x, w)
            if name in {"qkv", "gate_up"}:
                act = "silu" if name == "gate_up" else None
                ways["norm_gemv"] = lambda w, x=x, g=gain, a=act: norm_gemv(x, g, 1e-5, w, residual=x, activation=a)
        if 1 < rows <= MOST:
            ways["skinny_gemm"] = lambda w, x=x: skinny_gemm(x, w)
        if name == "gate_up" and rows <= MOST:
            own = gemv if rows == 1 else skinny_gemm
            ways["gated"] = lambda w, x=x, own=own: own(x, w, activation="silu")
        for way, call in ways.items():
            yield Case(f"{name}, {way}", [lambda w=w, call=call: call(w) for w in weights], nbytes, operations)


def between(shape: Shape, rows: int) -> Iterator[Case]:
    """Yield what stands between the products, but for attention."""
    from slotline.kernels.gate import gate
    from slotline.kernels.rms_norm import rms_norm
    from slotline.kernels.rotate_and_store import HeadNorms, rotate_and_store

    x, residual, gain = draw(rows, shape.hidden), draw(rows, shape.hidden), draw(shape.hidden)
    yield Case("rms_norm", [lambda: rms_norm(x, gain, 1e-5, residual)] * 8, 8.0 * x.numel())
    both = draw(rows, 2 * shape.inner)
    yield Case("gate", [lambda: gate(both)] * 8, 3.0 * both.numel())
    qkv = draw(rows, shape.products["qkv"][0])
    pages = draw(2, rows + 1, shape.kv_heads, PAGE, shape.dim)
    places = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda") * PAGE
    angles = torch.randn(4096, shape.dim, device="cuda")
    norms = HeadNorms(draw(shape.dim), draw(shape.dim), 1e-6) if shape.normed else None
    call = lambda: rotate_and_store(qkv, angles, places, places, pages[0], pages[1], norms)  # noqa: E731
    yield Case("rotate_and_store", [call] * 8, 4.0 * qkv.numel())


class Cache:
    """Keys and values of rows of one length, in several sets, on shuffled pages."""

    def __init__(self, shape: Shape, rows: int, context: int, sets: int | None = None) -> None:
        pages = -(-context // PAGE)
        self.nbytes = 4.0 * rows * context * shape.kv_heads * shape.dim
        size = (rows * pages + 1, shape.kv_heads, PAGE, shape.dim)
        self.sets = [(draw(*size), draw(*size)) for _ in range(sets or copies(self.nbytes))]
        blocks = 1 + torch.randperm(rows * pages, device="cuda").int()
        self.tables = blocks.view(rows, pages).contiguous()
        self.rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")


def attention(shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """Yield attention of one token a row, and what prepares it once a step."""
    from slotline.kernels.paged_attention import cut_for, list_splits, paged_attention

    cache = Cache(shape, rows, context)
    cut = cut_for(rows, shape.kv_heads)
    prepare = lambda: list_splits(cache.lengths, cut.capacity(rows, context), 0, cut, cache.rows)  # noqa: E731
    yield Case("list_splits", [prepare] * 8, 0.0)
    work = prepare()
    q = draw(rows, shape.heads, shape.dim)
    calls = [
        lambda k=k, v=v: paged_attention(q, k, v, cache.tables, cache.rows, cache.lengths, work, scale=shape.dim**-0.5)
        for k, v in cache.sets
    ]
    yield Case(f"paged_attention, {context} keys", calls, cache.nbytes)


def prompts(shape: Shape) -> Iterator[Case]:
    """Yield attention of prompts: a long one, the end of one, and short ones among empty tiles."""
    from slotline.kernels.prefill_attention import Chunks, list_tiles, prefill_attention

    device = torch.device("cuda")
    for name, starts, counts, empty in (
        ("8192 tokens", [0], [LONG], 0),
        ("2048 after 6144", [LONG - 2048], [2048], 0),
        ("4 of 300, 128 tiles", [0] * 4, [300] * 4, 116),
    ):
        cache = Cache(shape, len(counts), starts[0] + counts[0], 1)
        tiles = list_tiles(starts, counts, list(range(len(counts))), device)
        none = torch.full((empty,), -1, dtype=torch.int32, device=device)
        lists = [torch.cat([column, none]) for column in (tiles.tile_chunks, tiles.tile_numbers)]
        chunks = Chunks(tiles.begins, tiles.starts, tiles.table_rows, *lists)
        q = draw(sum(counts), shape.heads, shape.dim)
        seen = sum(n * s + n * (n + 1) // 2 for s, n in zip(starts, counts, strict=True))

        def call(q: Tensor = q, cache: Cache = cache, chunks: Chunks = chunks) -> Tensor:
            return prefill_attention(q, *cache.sets[0], cache.tables, chunks, scale=shape.dim**-0.5)

        yield Case(f"prefill_attention, {name}", [call] * 4, 0.0, 4.0 * shape.heads * shape.dim * seen)


class Step:
    """A whole step of rows with one token each, without sampling, on kernels that may be launched dependently."""

    def __init__(self, shape: Shape, rows: int, context: int) -> None:
        from slotline.kernels.rotate_and_store import HeadNorms

        self.shape, self.cache = shape, Cache(shape, rows, context, shape.layers)
        sizes = shape.products
        self.head = draw(*sizes.pop("head"))
        self.layers = [{name: draw(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
        self.gain = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
        self.norms = HeadNorms(self.gain[: shape.dim], self.gain[: shape.dim], 1e-6) if shape.normed else None
        self.angles = torch.randn(context, shape.dim, device="cuda")
        self.positions = self.cache.lengths - 1
        last = (context - 1) // PAGE
        self.places = (self.cache.tables[:, last] * PAGE + (context - 1) % PAGE).contiguous()
        self.x = draw(rows, shape.hidden) * 50

    def __call__(self, dependent: bool, fused: bool = False) -> Tensor:
        """Return logits; ``fused`` has norms done by the products behind them."""
        from slotline.kernels.gate import gate
        from slotline.kernels.gemv import gemv
        from slotline.kernels.norm_gemv import norm_gemv
        from slotline.kernels.paged_attention import cut_for, list_splits
        from slotline.kernels.rms_norm import rms_norm
        from slotline.kernels.skinny_gemm import pays, skinny_gemm

        product = gemv if len(self.x) == 1 else skinny_gemm
        gated = product is gemv or pays(len(self.x), self.shape.inner, self.shape.hidden, gated=True)
        cut = cut_for(len(self.x), self.shape.kv_heads)
        c = self.cache
        work = list_splits(c.lengths, cut.capacity(len(self.x), PAGE * c.tables.shape[1]), 0, cut, c.rows)
        x, residual = torch.zeros_like(self.x), self.x.clone()
        for layer, pages in zip(self.layers, c.sets, strict=True):
            on = {"dependent": dependent}
            if fused:
                qkv, residual = norm_gemv(x, self.gain, 1e-5, layer["qkv"], residual=residual, **on)
            else:
                qkv = product(rms_norm(x, self.gain, 1e-5, residual, **on), layer["qkv"], **on)
            x = product(self._attend(qkv, pages, work, dependent), layer["o"], **on)
            if fused:
                x, residual = norm_gemv(
                    x, self.gain, 1e-5, layer["gate_up"], residual=residual, activation="silu", **on
                )
            else:
                x = rms_norm(x, self.gain, 1e-5, residual, **on)
                x = product(x, layer["gate_up"], activation="silu" if gated else None, **on)
                x = x if gated else gate(x, **on)
            x = product(x, layer["down"], **on)
        x = rms_norm(x, self.gain, 1e-5, residual, dependent=dependent)
        return product(x, self.head, out_dtype=torch.float32, dependent=dependent)

    def _attend(self, qkv: Tensor, pages: tuple[Tensor, Tensor], work: object, dependent: bool) -> Tensor:
        from slotline.kernels.paged_attention import paged_attention
        from slotline.kernels.rotate_and_store import rotate_and_store

        c, scale = self.cache, self.shape.dim**-0.5
        q = rotate_and_store(qkv, self.angles, self.positions, self.places, *pages, self.norms, dependent=dependent)
        out = paged_attention(q, *pages, c.tables, c.rows, c.lengths, work, scale=scale, dependent=dependent)
        return out.flatten(1)

    @property
    def nbytes(self) -> float:
        """Return the bytes of weights and keys and values."""
        weights = sum(w.nbytes for layer in self.layers for w in layer.values()) + self.head.nbytes
        return weights + self.shape.layers * self.cache.nbytes


def steps(shape: Shape, rows: int, context: int) -> Iterator[Case]:
    """Yield whole steps: launched one after the other, dependently, and with norms inside products."""
    step = Step(shape, rows, context)
    plain = step(False)
    for name, dependent, fused in (("plain", False, False), ("dependent", True, False), ("fused", True, True)):
        if fused and rows > 1:
            continue
        near = torch.nn.functional.cosine_similarity(step(dependent, fused).flatten(), plain.flatten(), 0)
        assert float(near) > 0.99, f"{name} steps differ: {float(near)}"
        yield Case(f"step, {name}", [lambda d=dependent, f=fused: step(d, f)], step.nbytes)


def measure(case: Case, bandwidth: float, rate: float, repeats: int) -> dict[str, object]:
    """Return what a case took; bandwidth and rate a microsecond."""
    us = graph_time(list(case.calls), repeats)
    floor = max(case.nbytes / bandwidth, case.operations / rate)
    row: dict[str, object] = {"kernel": case.name, "us": round(us, 2), "floor_us": round(floor, 2)}
    if case.nbytes:
        row["tb_per_s"] = round(case.nbytes / us / 1e6, 3)
    if case.operations:
        row["tflop_per_s"] = round(case.operations / us / 1e6, 1)
    return row


def product_rate(repeats: int) -> float:
    """Return operations a microsecond of a large bfloat16 product."""
    a, b = draw(LONG, LONG), draw(LONG, LONG)
    return 2.0 * LONG**3 / graph_time([lambda: torch.mm(a, b)], repeats)


def cases(shape: Shape, rows: Sequence[int], context: int) -> Iterator[tuple[int, Case]]:
    """Yield every case with its number of rows."""
    for count in rows:
        for family in (products(shape, count), between(shape, count), attention(shape, count, context)):
            yield from ((count, case) for case in family)
        if count in {1, 8}:
            yield from ((count, case) for case in steps(shape, count, context))
    yield from ((1, case) for case in prompts(shape))


def main() -> None:
    """Measure, print a table, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_model_kernels needs a CUDA GPU: torch sees none here")
    bandwidth, rate = copy_bandwidth(args.repeats), product_rate(args.repeats)
    print(f"a copy moves {bandwidth / 1e6:.2f} TB/s, a product does {rate / 1e6:.0f} TFLOP/s")
    found: list[dict[str, object]] = [{"copy_tb_per_s": bandwidth / 1e6, "product_tflop_per_s": rate / 1e6}]
    for name in args.shapes:
        for count, case in cases(SHAPES[name], args.rows, args.context):
            row = {"shape": name, "rows": count, **measure(case, bandwidth, rate, args.repeats)}
            print(" | ".join(str(value) for value in row.values()), flush=True)
            found.append(row)
    record.keep(found, "model-kernels", args.out)


if __name__ == "__main__":
    main()
