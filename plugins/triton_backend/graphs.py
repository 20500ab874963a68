"""Recorded steps: whole ones for rows that decode, forward passes and draws apart for the others."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slotline.plan import IntArray, StepPlan
from slotline.plugins.triton_backend.attention import FINE, Whole, library_lengths
from slotline.plugins.triton_backend.decoder import Decoder
from slotline.plugins.triton_backend.inputs import Columns, Layout, fill, fill_single
from slotline.plugins.triton_backend.rows import to_device
from slotline.plugins.triton_backend.sampling import Kind, choose

MOST_TOKENS = 2048  # of a step with prompts that is recorded; for more, launching takes less than computing
T = TypeVar("T")


class Recording(Generic[T]):
    """A function whose launches are recorded as a CUDA graph; without a stream to record on it is simply called.

    The function is held, and with it every tensor that the recording reads.

    Args:
        first: runs before it is recorded, to compile every kernel of this size; the function itself unless given.
    """

    def __init__(
        self, function: Callable[[], T], pool: Any = None, stream: Any = None, first: Callable[[], object] | None = None
    ) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # what the first run reads must be there
        with torch.cuda.stream(stream):
            (first or function)()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread must not wait meanwhile: others of the host's program are free to use the device.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._out = function()

    def __call__(self) -> T:
        """Run it; what it returns is overwritten by the next run."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._out


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the garbage collector away: recordings of an engine that is gone, freed while another records, break it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraphs:
    """All recordings of a backend, made once. They share what they write to and their scratch memory.

    Args:
        most: tokens that one prompt brings to a step at most.

    Attributes:
        whole_sizes: tokens of the recorded steps that are one prompt from its beginning on, for library attention.
        inputs: [words] int32, the columns that recordings read.
        round: tokens of a step that is not recorded are rounded up to a multiple of this.
        picked: [slots, C] the outputs that sampling rows take.
    """

    def __init__(
        self, decoder: Decoder, slots: int, width: int, dtype: torch.dtype, seen: Tensor | None, most: int
    ) -> None:
        self._seen = seen
        self._decoder = decoder
        self._slots = slots
        device = decoder.state.device
        compiled = device.type == "cuda"
        self.decode_sizes = sizes_up_to(slots, DECODE_SIZES if compiled else FEW_ROWS)
        self.token_sizes = TOKEN_SIZES if compiled else FEW_TOKENS
        self.sample_sizes = sizes_up_to(slots, SAMPLE_SIZES if compiled else FEW_ROWS)
        lengths = (library_lengths(most) if compiled else FEW_WHOLES) if decoder.library else ()
        self.whole_sizes = tuple(n for n in lengths if self.token_sizes[-1] < n <= FINE)
        self.round = 64 if compiled else 8
        self._head = Layout(slots, 0, 0)
        self._layouts: dict[tuple[int, bool], Layout] = {}
        self._largest = max(self.token_sizes[-1], slots)
        layouts = [self.layout(n, chunks=True) for n in (self.token_sizes[-1], slots)]
        layouts += [Layout.of(slots, n, chunks=False) for n in self.whole_sizes[-1:]]
        self.most_words = max(layout.words for layout in layouts)
        self.inputs = torch.zeros(self.most_words, dtype=torch.int32, device=device)
        self.picked = torch.zeros((slots, width), dtype=dtype, device=device)
        pool = torch.cuda.graph_pool_handle() if compiled else None
        # One stream for all of them: libraries keep tens of megabytes of scratch for each stream they have seen.
        stream: Any = torch.cuda.Stream(device) if compiled else None  # type: ignore[no-untyped-call]

        def record(function: Callable[[], T], first: Callable[[], object] | None = None) -> Recording[T]:
            return Recording(function, pool, stream, first)

        shallow = decoder.shallow()
        self._try_lengths(shallow, [n for n in lengths if n not in self.whole_sizes])
        with _nothing_collected():
            self._wholes = {
                n: record(self._whole(n, decoder), self._whole(n, shallow)) for n in reversed(self.whole_sizes)
            }
            self._forwards = {n: record(self._forward(n)) for n in reversed(self.token_sizes)}
            self._steps = {(n, kind): record(self._step(n, kind)) for n in reversed(self.decode_sizes) for kind in Kind}
            self._draws = {(n, kind): record(self._draw(n, kind)) for n in reversed(self.sample_sizes) for kind in Kind}

    def close(self) -> None:
        """Let go of all recordings: their functions hold this object, and with it all that the backend has."""
        for recordings in (self._wholes, self._forwards, self._steps, self._draws):
            recordings.clear()

    def layout(self, tokens: int, *, chunks: bool) -> Layout:
        """Return the layout of so many tokens."""
        found = self._layouts.get((tokens, chunks))
        if found is None:
            found = Layout.of(self._slots, tokens, chunks=chunks)
            if tokens <= self._largest or not chunks:  # those of steps that are not recorded are too many to keep
                self._layouts[tokens, chunks] = found
        return found

    def words(self, layout: Layout, plan: StepPlan, left_out: Mapping[int, int] = MappingProxyType({})) -> IntArray:
        """Return the words of a plan, see `fill`."""
        return fill(layout, plan, left_out, decode=not self._decoder.exact)

    def single_words(self, size: int, plan: StepPlan) -> IntArray:
        """Return the words of a plan whose rows bring one token each and sample, for the step of ``size`` rows."""
        if self._decoder.exact:
            return self.words(self.layout(size, chunks=True), plan)
        return fill_single(self.layout(size, chunks=False), plan)

    @property
    def head_words(self) -> int:
        """Return how many words at the front of the inputs sampling reads."""
        return self._head.words

    @property
    def head(self) -> Columns[Tensor]:
        """Return the columns that sampling reads."""
        return self._head.split(self.inputs)

    def step(self, size: int, kind: Kind) -> Tensor:
        """Compute and sample ``size`` rows with one token each; return the words that `choose` does."""
        return self._steps[size, kind]()

    def forward(self, size: int) -> None:
        """Compute ``size`` tokens of any rows into ``picked``."""
        self._forwards[size]()

    def whole(self, size: int) -> None:
        """Compute ``size`` tokens of one prompt, from its beginning on, into ``picked``."""
        self._wholes[size]()

    def draw(self, size: int, kind: Kind) -> Tensor:
        """Sample ``size`` rows from ``picked``; return the words that `choose` does."""
        return self._draws[size, kind]()

    def _columns(self, tokens: int, *, chunks: bool) -> Columns[Tensor]:
        layout = self.layout(tokens, chunks=chunks)
        self.inputs[: layout.words] = to_device(layout.blank.copy(), self.inputs.device)
        return layout.split(self.inputs)

    def _try_lengths(self, decoder: Decoder, lengths: Sequence[int]) -> None:
        """Have library attention get ready for lengths that only steps without a recording have."""
        for tokens in lengths:
            layout = Layout.of(self._slots, tokens, chunks=False)
            columns = layout.split(to_device(layout.blank.copy(), self.inputs.device))
            decoder.picked(columns, 0, (Whole(0, tokens),))

    def _forward(self, tokens: int) -> Callable[[], None]:
        columns = self._columns(tokens, chunks=True)

        def run() -> None:
            self.picked.copy_(self._decoder.picked(columns, 0 if self._decoder.exact else self._slots))

        return run

    def _whole(self, tokens: int, decoder: Decoder) -> Callable[[], None]:
        columns = self._columns(tokens, chunks=False)

        def run() -> None:
            self.picked.copy_(decoder.picked(columns, 0, (Whole(0, tokens),)))

        return run

    def _step(self, rows: int, kind: Kind) -> Callable[[], Tensor]:
        columns = self._columns(rows, chunks=self._decoder.exact)

        def run() -> Tensor:
            logits = self._decoder.logits(self._decoder.hidden(columns, 0 if self._decoder.exact else rows))
            return choose(kind, logits, self._decoder.state, columns.slots[:rows], columns.following[:rows], self._seen)

        return run

    def _draw(self, rows: int, kind: Kind) -> Callable[[], Tensor]:
        columns = self._columns(1, chunks=False)

        def run() -> Tensor:
            logits = self._decoder.logits(self.picked[:rows])
            return choose(kind, logits, self._decoder.state, columns.slots[:rows], columns.following[:rows], self._seen)

        return run


FEW_ROWS, FEW_TOKENS, FEW_WHOLES = (1, 4), (24,), (40,)  # where nothing is recorded, sizes only try out the padding
DECODE_SIZES = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, 4097, 32))
SAMPLE_SIZES = (1, 2, 4, 8, 16, 32, 64, *range(128, 4097, 128))
TOKEN_SIZES = (16, 32, *range(64, 1025, 64), *range(1152, MOST_TOKENS + 1, 128))


def sizes_up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes below ``most``, and ``most``."""
    return (*(s for s in sizes if s < most), most)


def size_for(count: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest size that holds ``count``, or None."""
    at = bisect.bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None
