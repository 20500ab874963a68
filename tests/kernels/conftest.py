"""Cases for every op: pairs of properties where Triton is interpreted, all combinations on a GPU."""

import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
INF = math.inf

VOCABULARIES = [32, 49_152, 92_544, 151_936]
KINDS = ["plain", "ties", "masked", "one", "flat", "huge"]
ROWS = [1, 2, 4] if INTERPRETED else [1, 5, 64, 257]
WIDTHS = [0, 1, 5, 20, 1024]
CUTS = {
    "temperature": [0.0, 0.7, 1.0, 1.6],
    "top_k": [0, 1, 50, 3000],
    "top_p": [1.0, 0.9, 0.3, 0.0],
    "min_p": [0.0, 0.02, 1.0],
}


def pairwise(axes: Mapping[str, Sequence], tries: int = 40) -> Iterator[dict]:
    """Yield cases until every two values of two axes were in one: each the best of some that hold an open pair."""
    rng = random.Random(7)
    names = list(axes)
    pairs = {frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    while pairs:
        wanted = dict(min(pairs, key=lambda pair: sorted(map(repr, pair))))
        drawn = [{name: rng.choice(list(axes[name])) for name in names} | wanted for _ in range(tries)]
        covered = [{frozenset(two) for two in itertools.combinations(case.items(), 2)} & pairs for case in drawn]
        best = max(range(tries), key=lambda i: len(covered[i]))
        pairs -= covered[best]
        yield drawn[best]


def every(axes: Mapping[str, Sequence]) -> Iterator[dict]:
    """Yield all combinations."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


GRIDS = {
    "row_case": {"vocab": VOCABULARIES, "kind": KINDS, "rows": ROWS},
    "top_case": {"vocab": VOCABULARIES, "kind": KINDS, "rows": ROWS, "width": WIDTHS},
    # On a GPU the rows of a batch take all the cuts in turn, see `spread`.
    "cut_case": {"vocab": VOCABULARIES, "kind": KINDS, "rows": ROWS} | (CUTS if INTERPRETED else {}),
}


def spread(rows: int, seed: int) -> dict[str, list]:
    """Return cuts for the rows of a batch: all combinations in random order, over and over."""
    cuts = list(every(CUTS))
    random.Random(seed).shuffle(cuts)
    return {name: [cuts[i % len(cuts)][name] for i in range(rows)] for name in CUTS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the grids that a test asks for by the name of an argument."""
    for name, axes in GRIDS.items():
        if name in metafunc.fixturenames:
            cases = list(pairwise(axes)) if INTERPRETED else list(every(axes))
            metafunc.parametrize(name, cases, ids=lambda case: "-".join(map(str, case.values())))


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def make_logits():
    """Return a function that makes logits [rows, vocab] of a kind, the same for the same arguments."""

    def make(vocab: int, kind: str = "plain", rows: int = 1, seed: int = 0) -> torch.Tensor:
        rng = torch.Generator(DEVICE).manual_seed(1000 * seed + vocab + rows + len(kind))
        x = torch.randn(rows, vocab, generator=rng, device=DEVICE) * 3
        hidden = torch.rand(rows, vocab, generator=rng, device=DEVICE) < 0.7
        keep = torch.randint(vocab, (rows, 1), generator=rng, device=DEVICE)
        hidden.scatter_(1, keep, False)
        if kind == "ties":
            x = x.round()
        elif kind == "masked":
            x[hidden] = -INF
        elif kind == "one":
            x = torch.full_like(x, -INF).scatter_(1, keep, 3.0)
        elif kind == "flat":
            x = torch.full_like(x, 1.5)
        elif kind == "huge":
            x = x * 1e36  # differences stay finite
        return x

    return make


@pytest.fixture
def all_cuts():
    """Return a function from a number of rows to cuts for them."""
    return lambda rows: spread(rows, seed=rows)


@pytest.fixture
def make_rows(device):
    """Return a function that makes the per-row tensors of `sample` from one value or one value a row."""

    def column(value, rows: int, dtype: torch.dtype) -> torch.Tensor:
        values = list(value) if isinstance(value, Sequence) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    def make(rows: int, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, seed=11, position=0) -> tuple:
        log_min_p = [math.log(p) if p > 0 else -INF for p in (min_p if isinstance(min_p, list) else [min_p] * rows)]
        seeds = list(seed) if isinstance(seed, Sequence) else [seed + 7919 * i for i in range(rows)]
        positions = list(position) if isinstance(position, Sequence) else [position + i for i in range(rows)]
        return (
            column(temperature, rows, torch.float32),
            column(log_min_p, rows, torch.float32),
            column(top_k, rows, torch.int32),
            column(top_p, rows, torch.float32),
            torch.tensor(seeds, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
        )

    return make
