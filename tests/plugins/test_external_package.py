"""An outside package, really installed: it is found, switched off, and passes the conformance suite."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "external_backend"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and install a copy of the example into a folder of its own; needs no package index."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-P", "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", target, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def python(installed: Path, *arguments: str, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with the package on its path; ``plugins`` is the switch."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLOTLINE_")}
    environ |= {"PYTHONPATH": str(installed)} | ({} if plugins is None else {"SLOTLINE_PLUGINS": plugins})
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environ, cwd=installed, capture_output=True, text=True, check=False)


LIST = """
import json
from slotline.manager import BUILTINS, PluginManager
outside = [info for info in PluginManager().plugins() if info.name not in BUILTINS]
print(json.dumps([(info.name, info.distribution, info.version, info.hooks) for info in outside]))
"""
FOUND = [
    "bigram",
    "slotline-bigram",
    "0.1.0",
    ["slotline_register_backends", "slotline_register_chat_templates"],
]


@pytest.mark.parametrize(
    ("switch", "loaded"),
    [(None, [FOUND]), ("", []), ("bigram", [FOUND]), ("slotline_bigram", [FOUND])],
    ids=["unset", "empty", "entry-point", "distribution"],
)
def test_switch_decides_whether_it_is_loaded(installed, switch, loaded):
    done = python(installed, "-c", LIST, plugins=switch)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == loaded


def test_switch_naming_another_package_is_an_error(installed):
    done = python(installed, "-c", LIST, plugins="bigrams")
    assert done.returncode != 0
    assert "no plugin 'bigrams' is installed; installed: bigram (slotline-bigram)" in done.stderr


def test_its_backend_and_template_are_there(installed):
    code = """
from slotline.manager import PluginManager
manager = PluginManager()
assert manager.backend("bigram").summary and "bigram" in manager.registry("backends")
assert "assistant:" in manager.registry("chat_templates")["dialogue"]
"""
    done = python(installed, "-c", code)
    assert done.returncode == 0, done.stderr


def test_it_passes_its_own_conformance_test(installed, tmp_path):
    for name in ("conftest.py", "test_slotline_bigram.py"):
        shutil.copyfile(EXAMPLE / name, tmp_path / name)
    done = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and " failed" not in done.stdout


def test_the_example_is_short():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLE.iterdir() if path.is_file())
    assert lines < 150
