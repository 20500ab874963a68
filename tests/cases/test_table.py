"""The table of cases: all 117 are there, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "cases.md"
CASES = {
    "LP": "01 03 04 05 06 07 09 11 12 13 15",
    "ST": "01 02 03 04 06 07 09",
    "DT": "01 03 05 06 07",
    "SP": "01 02 03 05 06 08 10",
    "SM": "01 03 04 05 06 08 10 12 13",
    "PV": "01 03 04 06 08 09 10 11 13 15 16",
    "CH": "01 02 03 05 06 08 09 12 13",
    "SC": "01 03 04 05 07",
    "KV": "01 02 04 06 08 09",
    "PR": "01 04 05",
    "CX": "01 02 05",
    "OV": "01 02",
    "HS": "01 03 04 06 08 09 11",
    "TC": "01 02 05 06 08",
    "SO": "01 02 04 05 07 08 10 11",
    "ML": "01 03 05 06 08 09 10",
    "QZ": "01 02",
    "MO": "01 02 05 06 07",
    "UX": "01 03 05",
    "DI": "01 03",
}
# Files of this folder that are about something else than single cases.
OTHERS = {
    "test_clients.py",
    "test_docs.py",
    "test_fuzz.py",
    "test_lm_eval.py",
    "test_openai_client.py",
    "test_table.py",
}


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the test functions of a file, named from ``tests/``."""
    tree = ast.parse((HERE.parent / file).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


def rows() -> list[tuple[str, str, str]]:
    """Return case, file of its section, and line, for each line of the tables."""
    found, file = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            file = ""
        if match := re.match(r"Tests are in `tests/(cases/test_\w+\.py)`", line):
            file = match[1]
        if match := re.match(r"\| ([A-Z]{2}-\d{2}) \|", line):
            found.append((match[1], file, line))
    return found


def named(file: str, line: str) -> list[tuple[str, str]]:
    """Return file and name of each test that a line names."""
    return [(other or file, test) for other, test in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", line)]


def test_every_case_is_in_the_table_once():
    listed = [case for case, _, _ in rows()]
    assert sorted(listed) == sorted(f"{area}-{number}" for area, all_of in CASES.items() for number in all_of.split())
    assert len(listed) == 117


def test_every_test_that_is_named_exists():
    missing = [
        (case, test) for case, file, line in rows() for f, test in named(file, line) if test not in functions_of(f)
    ]
    assert not missing
    assert [case for case, file, line in rows() if not named(file, line)] == ["DI-01"]


def test_every_test_of_a_case_is_named():
    for case, file, line in rows():
        start = f"test_{case.lower().replace('-', '_')}_"
        assert not file or all(test.startswith(start) for f, test in named(file, line) if f == file), case
    here = {f"cases/{path.name}" for path in HERE.glob("test_*.py") if path.name not in OTHERS}
    told = {pair for _, file, line in rows() for pair in named(file, line)}
    assert not {(file, test) for file in here for test in functions_of(file)} - told
