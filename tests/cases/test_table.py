"""The table of cases: each is there, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = {
    "LP": ("01", "03", "04", "05", "06", "07", "09", "11", "12", "13", "15"),
    "SP": ("01", "02", "03", "05", "06", "08", "10"),
    "DT": ("01", "03", "05", "06", "07"),
}
FILES = {"LP": "test_logprobs.py", "SP": "test_stops.py", "DT": "test_text.py"}


def rows() -> dict[str, str]:
    """Return the lines of the table by case."""
    lines = (HERE.parents[1] / "docs" / "cases.md").read_text(encoding="utf-8").splitlines()
    found = [(match[1], line) for line in lines if (match := re.match(r"\| ([A-Z]{2}-\d{2}) \|", line))]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_every_case_is_in_the_table():
    assert list(rows()) == [f"{area}-{number}" for area, numbers in CASES.items() for number in numbers]


def test_the_table_names_every_test_of_a_case_and_no_other():
    for area, file in FILES.items():
        tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        named = {case: set(re.findall(r"`(test_\w+)`", line)) for case, line in rows().items() if case[:2] == area}
        assert set.union(*named.values()) == tests
        for case, names in named.items():
            assert names and all(name.startswith(f"test_{case.lower().replace('-', '_')}_") for name in names)
