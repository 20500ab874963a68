"""What was measured about products: for each shape of weights, and number of rows, the fastest way to compute them.

A table is a JSON file named by the device and by the Triton that made it. Those in `kernels/tuned` come with the
package; `slotline tune` writes others to ``$SLOTLINE_CACHE/tuned``, which go before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import triton

import slotline.kernels
from slotline.errors import ConfigError
from slotline.kernels.skinny_gemm import MOST, pays
from slotline.kernels.tiled_gemm import Tile


class Use(Enum):
    """What a product is for: hidden states, such for a norm, gated ones, or logits in float32."""

    PLAIN = "plain"
    NORMED = "normed"  # may come in parts, which the norm adds up
    GATED = "gated"
    LOGITS = "logits"


class Other(Enum):
    """Ways beside tiles."""

    LIBRARY = "library"
    CUBLASLT = "cublaslt"  # where a product with a bias goes; it has other kernels for the same shapes
    FEW = "few"  # kernels.skinny_gemm

    def __str__(self) -> str:
        return self.value


Way = Tile | Other


@dataclass(frozen=True, slots=True)
class Product:
    """Weights [rows, columns], and what they are for."""

    rows: int
    columns: int
    use: Use


Choices = Sequence[tuple[int, Way]]  # up to how many rows of x, ascending: which way


class Tuning:
    """The measured choices of a device; rules of thumb for what was not measured."""

    def __init__(self, measured: Mapping[Product, Choices] | None = None) -> None:
        self._measured = dict(measured or {})

    def way(self, product: Product, count: int, size: int) -> Way:
        """Return how to multiply ``count`` rows, 2 or more, of elements of ``size`` bytes."""
        measured = self._measured.get(product)
        if size == 2 and measured is not None:
            return next((way for most, way in measured if count <= most), Other.LIBRARY)
        gated = product.use is Use.GATED
        rows = product.rows // 2 if gated else product.rows
        return Other.FEW if pays(count, rows, product.columns, gated=gated, size=size) else Other.LIBRARY

    def turns(self, product: Product) -> list[int]:
        """Return the numbers of rows, from 2 on, at which another way begins."""
        measured = self._measured.get(product, ())
        return sorted({2, MOST // 2 + 1, MOST + 1, *(most + 1 for most, _ in measured)})  # MOST: where few rows end

    @classmethod
    def of(cls, device: str, folders: Iterable[Path] = (), *, version: str = triton.__version__) -> Tuning:
        """Read what is known of a device: of several folders, the first that knows a product.

        In a folder, measurements with another Triton count where those with ``version`` are missing, new ones first.

        Raises:
            ConfigError: a file is damaged.
        """
        measured: dict[Product, Choices] = {}
        for folder in (*folders, SHIPPED):
            own = folder / file_name(device, version)
            others = sorted(folder.glob(file_name(device, "*")), key=_version, reverse=True)
            for path in (own, *others):
                for product, choices in read(path).items():
                    measured.setdefault(product, choices)
        return cls(measured)


SHIPPED = Path(slotline.kernels.__file__).parent / "tuned"


def file_name(device: str, version: str = triton.__version__) -> str:
    """Return the name of the file of a device and a Triton version, of which two numbers count."""
    return f"{re.sub(r'[^A-Za-z0-9.]+', '_', device)}-triton-{'.'.join(version.split('.')[:2])}.json"


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.stem.rpartition("-")[2])]


def read(path: Path) -> dict[Product, Choices]:
    """Read a file; one that is not there knows nothing.

    Raises:
        ConfigError: it is damaged.
    """
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["products"]
        return {_product(entry): [(int(most), _way(way)) for most, way in entry["ways"]] for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); delete it, or write it anew with `slotline tune`") from error


def write(path: Path, measured: Mapping[Product, Choices], **about: str) -> None:
    """Write a file; ``about`` says by what it was measured.

    Raises:
        ConfigError: it cannot be written.
    """
    entries = [
        {
            "rows": product.rows,
            "columns": product.columns,
            "use": product.use.value,
            "ways": [[most, str(way)] for most, way in choices],
        }
        for product, choices in measured.items()
    ]
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in about.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{{head}"products": [\n  {lines}\n]}}\n')
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place with --out") from error


def _product(entry: Any) -> Product:
    return Product(int(entry["rows"]), int(entry["columns"]), Use(entry["use"]))


def _way(text: str) -> Way:
    return Tile.parse(text) if text.startswith("tile") else Other(text)
