"""The ops on a CPU, through Triton's interpreter.

Whether Triton interprets is decided when it is imported, so the tests in `ops/` run in processes of their own here.
On a GPU the same tests are collected as they are, compiled, over the full grid of cases (marker `gpu`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OPS = Path(__file__).parent / "ops"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(path.name for path in OPS.glob("test_*.py")))
def test_ops_interpreted(name):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", str(OPS / name), "-q", "-p", "no:cacheprovider", "--durations=5"]
    done = subprocess.run(command, env=env, cwd=OPS.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"=*\s*\d+ passed in .*", summary), f"not all tests ran and passed: {summary}"
