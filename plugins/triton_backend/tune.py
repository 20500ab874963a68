"""Measure the ways to compute a model's products on the GPU that is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slotline.kernels.rms_norm import rms_norm
from slotline.kernels.skinny_gemm import MOST
from slotline.kernels.tiled_gemm import Tile, fits
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.triton_backend.products import add, adds, compute
from slotline.plugins.triton_backend.tuning import Choices, Other, Product, Use, Way

COUNTS = (
    *(2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048, 4096, 8192),
)  # rows of x; between two of them, the choice for the larger one counts
MOST_LOGITS = 512
CACHE = 300_000_000  # bytes of weights that pass between two uses of the same ones: more than an L2 cache holds
AT_LEAST = 16  # products in a row, or what starting them takes would count as much as a small difference
LONG = 512  # rows of x above which one round through the weights is enough
MARGIN = 0.98  # of the library's time: what our own way must stay below

PLAIN = (
    Tile(32, 64, 128, 4, 6),
    Tile(32, 128, 64, 8, 4),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 256, 64, 4, 5),
    Tile(128, 128, 64, 4, 6),
    Tile(256, 128, 64, 8, 4),
)
PARTED = (  # for a norm
    Tile(32, 64, 128, 4, 6, 2),
    Tile(32, 64, 128, 4, 6, 4),
    Tile(64, 64, 128, 4, 6, 2),
    Tile(64, 64, 128, 4, 6, 4),
    Tile(64, 128, 128, 4, 4, 2),
    Tile(64, 256, 64, 4, 5, 2),
    Tile(128, 128, 64, 4, 6, 2),
    Tile(128, 256, 64, 8, 4, 4),
)
MOST_PARTED = 512  # rows: with more of them, the parts are too much to write and read
GATED = (
    Tile(32, 64, 64, 4, 4),
    Tile(32, 64, 128, 4, 5),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 5),
    Tile(128, 64, 64, 4, 6),
    Tile(128, 128, 64, 8, 4),
)


def products(config: DecoderConfig) -> list[Product]:
    """Return the products of a model."""
    flat = config.num_heads * config.head_dim
    both = flat + 2 * config.num_kv_heads * config.head_dim
    width, inner = config.hidden_size, config.intermediate_size
    return [
        Product(both, width, Use.PLAIN),
        Product(width, flat, Use.NORMED),
        Product(2 * inner, width, Use.GATED),
        Product(width, inner, Use.NORMED),
        Product(config.vocab_size, width, Use.LOGITS),
    ]


def ways(product: Product, count: int) -> Iterator[Way]:
    """Yield what may be fastest for ``count`` rows: libraries, our own few rows, tiles that are not mostly empty."""
    yield Other.LIBRARY
    if product.use is not Use.LOGITS:
        yield Other.CUBLASLT
    if count <= MOST:
        yield Other.FEW
    tiles: tuple[Tile, ...] = GATED if product.use is Use.GATED else PLAIN
    if product.use is Use.NORMED and count <= MOST_PARTED:
        tiles += PARTED
    for tile in tiles:
        if tile.rows <= max(32, 2 * count - 1) and min(count, 2048) <= 16 * tile.rows:
            yield tile


def fastest(times: dict[Way, float]) -> Way:
    """Return the library, unless something else is clearly faster."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < MARGIN * times[Other.LIBRARY] else Other.LIBRARY


def merged(choices: Sequence[tuple[int, Way]]) -> Choices:
    """Return choices without those that the next larger number of rows makes as well."""
    following = [*(way for _, way in choices[1:]), None]
    return [choice for choice, after in zip(choices, following, strict=True) if choice[1] != after]


def tune(
    product: Product,
    measure: Callable[[Product, int, Way], float | None],
    report: Callable[[str], None] = lambda line: None,
) -> Choices:
    """Return the fastest way for each number of rows.

    Args:
        measure: returns the time of a way, or None if it does not work here.
        report: gets a line for each number of rows.
    """
    found: list[tuple[int, Way]] = []
    for count in COUNTS:
        if product.use is Use.LOGITS and count > MOST_LOGITS:
            break
        times: dict[Way, float] = {}
        for way in ways(product, count):
            taken = measure(product, count, way)
            if taken is not None:
                times[way] = taken
        found.append((count, fastest(times)))
        named = ", ".join(f"{way} {taken:.1f}" for way, taken in sorted(times.items(), key=lambda item: item[1])[:3])
        report(f"[{product.rows}, {product.columns}] {product.use.value}, {count} rows, us: {named}")
    return merged(found)


class Stopwatch:
    """Time products on a GPU: a graph of many, whose weights do not fit into its cache."""

    def __init__(self, device: torch.device, dtype: torch.dtype, repeats: int = 5) -> None:
        self._device = device
        self._dtype = dtype
        self._repeats = repeats
        self._weights: list[Tensor] = []
        self._product: Product | None = None

    def __call__(self, product: Product, count: int, way: Way) -> float | None:
        """Return microseconds of one product; None where the device cannot do it."""
        if isinstance(way, Tile) and not self._fetches(product.columns):
            return None
        weights = self._weights_of(product)
        x = torch.randn(count, product.columns, device=self._device, dtype=self._dtype)
        zeros = x.new_zeros(product.rows)
        normed = product.use is Use.NORMED  # what adding up takes counts, too
        residual, gain = (x.new_zeros(count, product.rows), x.new_ones(product.rows)) if normed else (x, x)

        def run(weight: Tensor) -> None:
            if normed and adds(way, count):
                add(x, weight, residual)
                rms_norm(residual, gain, 1e-5)
                return
            found = compute(way, x, weight, None, product.use, zeros=zeros)
            if normed:
                rms_norm(found, gain, 1e-5, residual)

        try:
            for _ in range(2):  # compile, and let libraries set themselves up
                run(weights[0])
        except Exception:  # too little shared memory, or whatever a compiler says: then it is no choice
            if isinstance(way, Tile):
                return None
            raise
        torch.cuda.synchronize(self._device)
        line = weights if count > LONG else weights * -(-AT_LEAST // len(weights))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for weight in line:
                run(weight)
        return min(self._replay(graph) for _ in range(self._repeats)) / len(line)

    def _fetches(self, columns: int) -> bool:
        able: bool = torch.cuda.get_device_capability(self._device)[0] >= 9
        return able and fits(columns, self._dtype.itemsize)

    def _weights_of(self, product: Product) -> list[Tensor]:
        if product != self._product:
            self._weights = []
            nbytes = product.rows * product.columns * self._dtype.itemsize
            shape = (product.rows, product.columns)
            self._weights = [
                torch.randn(shape, device=self._device, dtype=self._dtype) * product.columns**-0.5
                for _ in range(max(2, min(32, -(-CACHE // nbytes))))
            ]
            self._product = product
        return self._weights

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return 1000.0 * float(start.elapsed_time(stop))
