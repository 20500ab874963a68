"""The shape of the repository: names, import directions, sizes, and nothing of anyone's machine."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import slotline

REPO = Path(__file__).resolve().parents[1]
ROOTS = {"slotline": "core", "slotline.plugins": "plugins", "slotline.kernels": "kernels", "slotline.apis": "apis"}
GRAFTED = [folder for folder in ROOTS.values() if folder != "core"]

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

# What the microkernel may import from outside; its test kit is a pytest plugin.
CORE_THIRD_PARTY = {"anyio", "msgspec", "numpy", "pluggy"}
TESTING_THIRD_PARTY = CORE_THIRD_PARTY | {"hypothesis", "pytest"}
# Loaders by name: the built-in plugins, and the command line behind `python -m slotline`.
LOADERS = {"core/manager.py": ("slotline.plugins", "slotline.apis"), "core/__main__.py": ("slotline.apis",)}
HEAVY = ["hypothesis", "pytest", "starlette", "tokenizers", "torch", "transformers", "triton", "uvicorn"]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders or ROOTS.values() for path in (REPO / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def imports_of(path: Path) -> Iterator[str]:
    """Yield every module that the file imports, at whatever depth, with `from a import b` as `a.b`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} uses a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offences(folder: str, *forbidden: str) -> list[str]:
    return [f"{name_of(p)}: {m}" for p in sources(folder) for m in imports_of(p) if is_under(m, *forbidden)]


def tracked() -> list[Path]:
    if not (REPO / ".git").exists():
        pytest.skip("not a git checkout")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, check=True, capture_output=True, text=True).stdout
    return [REPO / name for name in out.split("\0") if name and (REPO / name).is_file()]


# Names


def test_core_does_not_shadow_grafted_packages():
    clashes = [name for name in GRAFTED for p in (REPO / "core" / name, REPO / "core" / f"{name}.py") if p.exists()]
    assert not clashes, "a module in core/ hides the package of the same name in an editable install"


@pytest.mark.parametrize(("name", "folder"), ROOTS.items())
def test_folders_are_the_packages_they_claim(name, folder):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).resolve() == REPO / folder / "__init__.py"


@pytest.mark.parametrize("folder", ROOTS.values())
def test_raw_folders_refuse_to_be_imported(folder):
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); import {folder}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "ImportError" in done.stderr, f"`import {folder}` in the checkout worked"


def test_every_folder_of_modules_is_a_package():
    bare = {name_of(path.parent) for path in sources() if not (path.parent / "__init__.py").exists()}
    assert not bare, "without __init__.py these reach neither the wheel nor mypy"


def test_package_is_typed():
    assert (REPO / "core" / "py.typed").exists()


# Import directions: kernels <- plugins -> core, apis -> core


def test_core_imports_only_core():
    assert not offences("core", "slotline.plugins", "slotline.kernels", "slotline.apis")


def test_core_imports_little_else():
    found = []
    for path in sources("core"):
        allowed = TESTING_THIRD_PARTY if path.is_relative_to(REPO / "core" / "testing") else CORE_THIRD_PARTY
        tops = {module.partition(".")[0] for module in imports_of(path)} - sys.stdlib_module_names - {"slotline"}
        found += [f"{name_of(path)}: {top}" for top in sorted(tops - allowed)]
    assert not found


def test_core_names_the_others_only_in_its_loaders():
    dotted = re.compile(r"slotline\.(plugins|kernels|apis)(\.\w+)*(:\w+)?")
    found = []
    for path in sources("core"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and dotted.fullmatch(node.value):
                allowed = LOADERS.get(name_of(path), ())
                if not any(is_under(node.value.partition(":")[0], root) for root in allowed):
                    found.append(f"{name_of(path)}:{node.lineno}: {node.value!r}")
    assert not found


def test_kernels_import_only_kernels():
    found = offences("kernels", "slotline")
    assert not [line for line in found if not is_under(line.split(": ")[1], "slotline.kernels")]


def test_plugins_never_import_surfaces():
    assert not offences("plugins", "slotline.apis")


def test_surfaces_import_only_core():
    assert not offences("apis", "slotline.plugins", "slotline.kernels", "torch", "triton", "transformers")


def test_transformers_is_never_a_run_time_import():
    assert not offences("plugins", "transformers") + offences("kernels", "transformers")


def test_import_slotline_is_light():
    code = f"import json, sys, slotline; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


# Sizes; kernels are exempt, since a tile loop does not get clearer in pieces


def test_files_are_short():
    lengths = {name_of(p): p.read_text(encoding="utf-8").count("\n") for p in sources("core", "plugins", "apis")}
    assert not {name: n for name, n in lengths.items() if n > MAX_FILE_LINES}


def test_functions_are_short():
    found = {}
    for path in sources("core", "plugins", "apis"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found[f"{name_of(path)}:{node.lineno} {node.name}"] = length
    assert not found


# The rest of the repository


def test_version_is_the_changelogs_newest():
    heading = re.search(r"^## \[?([^\s\]]+)", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None and heading[1] == slotline.__version__


def test_decisions_are_listed():
    folder = REPO / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert not [p.name for p in folder.glob("[0-9]*.md") if f"({p.name})" not in index]


def test_no_machine_is_named():
    """Neither an absolute path of somebody's machine nor the address of a package index belongs in a repository."""
    path_like = re.compile(rb"(?<![\w./:~$}-])/(?:root|work|opt|home/\w+|Users/\w+)/\w")
    index_like = re.compile(rb"https?://[^\s\"']+/simple\b")
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if path_like.search(line) or index_like.search(line):
                found.append(f"{name_of(path)}:{number}: {line[:160].decode(errors='replace')}")
    assert not found
