"""A short part of `make chaos`: one seed each with groups that replace their lost, with segments, with reuse."""

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = "5"


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_no_promise_breaks(seed: int) -> None:
    program = Path(__file__).parent / "chaos.py"
    command = [sys.executable, program, "--seed", str(seed), "--seconds", SECONDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
