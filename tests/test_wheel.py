"""The wheel holds what the four folders hold, under one name, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PREFIX = {"core": "slotline", "plugins": "slotline/plugins", "kernels": "slotline/kernels", "apis": "slotline/apis"}
BUILD_INPUTS = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"}


def checkout_files() -> list[str]:
    """Name the files of the tree: tracked ones, and new ones that git does not ignore."""
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in out.split("\0") if name and (REPO / name).is_file()})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], zipfile.ZipFile]:
    """Build a wheel from a copy of the tree; return the names it should hold, and the wheel."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    names = [n for n in checkout_files() if n in BUILD_INPUTS or n.partition("/")[0] in PREFIX]
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / name, copy / name)
    command = [sys.executable, "-P", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", out, copy], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    # Notes for readers of a folder stay in the repository; all else below the four roots is part of the package.
    roots = [n for n in names if n not in BUILD_INPUTS and not n.endswith(".md")]
    expected = {f"{PREFIX[root]}/{rest}" for root, _, rest in (n.partition("/") for n in roots)}
    return expected, zipfile.ZipFile(wheel)


def test_wheel_holds_the_tree(built):
    expected, wheel = built
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert not expected - packed, "in the tree, missing from the wheel: package without __init__.py, or package-data"
    assert not packed - expected, "in the wheel, not in the tree"


def test_wheel_installs_one_name(built):
    _, wheel = built
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"slotline"}


def test_wheel_metadata(built):
    _, wheel = built
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert "License-Expression: Apache-2.0" in text
    assert required and all(">=" in line and "<" not in line and "==" not in line.split(";")[0] for line in required)
    (entry_points,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    groups = [line for line in wheel.read(entry_points).decode().splitlines() if line.startswith("[")]
    assert groups == ["[console_scripts]"], "built-in plugins and the test kit are not entry points"
