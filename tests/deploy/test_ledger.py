"""`argosy ledger` and `argosy ledger show`, on a run in a Redis that is not the run's own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from argosy.buffer import BufferSettings, ReplayBuffer, Task, Trace, Trajectory, unpack


def trajectory(attempt: str, task: Task) -> Trajectory:
    trace = Trace(np.array([1, 2]), np.array([False, True]), np.array([0, -0.5]), np.array([-1, 0]))
    group = attempt.partition("/")[0]
    return Trajectory(attempt, attempt, task, group, 1, 0, "argosy/repair", "terminated", 1.0, {}, [trace])


@pytest.fixture
def run(redis_url: str, run_name: str) -> list[str]:
    """A run with one attempt trained, one poisoned and two queued; the arguments that name it."""
    rules = {"run": run_name, "url": redis_url, "batch_size": 1, "eta": 3, "max_tries": 1}
    buffer = ReplayBuffer(BufferSettings.model_validate(rules))
    buffer.put_tasks(lambda index: Task(f"easy/{index}", "easy" if index else "hard", index), 4)
    for lease in buffer.lease("actor-0", 2):
        buffer.complete(lease, trajectory(lease.attempt, lease.task))
    buffer.claim(1)
    buffer.publish(1, trained_step=1)
    buffer.commit(1)
    buffer.claim(2)
    buffer.rewind(1, {})
    return ["demo", f"name={run_name}", f"buffer.url={redis_url}"]


def argosy(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "argosy.deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_ledger_as_a_table_and_as_json(run: list[str]) -> None:
    table = argosy("ledger", *run)
    assert table.returncode == 0, table.stderr
    rows = {
        row[0]: row[1:] for line in table.stdout.splitlines() if (row := line.strip("│ ").replace("│", " ").split())
    }
    assert rows["created"] == ["3", "1", "4"]
    assert rows["poisoned"] == ["1", "0", "1"]
    assert rows["lost"] == ["0", "0", "0"]
    assert "staleness of what was trained" in table.stdout
    found = json.loads(argosy("ledger", *run, "--json").stdout)
    assert (found["created"], found["trained"], found["dropped"], found["balanced"]) == (4, 1, {"poisoned": 1}, True)
    assert found["by_source"]["hard"]["trained"] == 1


def test_the_story_of_one_attempt(run: list[str], tmp_path: Path) -> None:
    told = argosy("ledger", "show", "1/0", *run)
    assert told.returncode == 0, told.stderr
    first, *events = told.stdout.splitlines()
    assert "easy/1" in first and first.endswith("dropped:poisoned")
    assert [event.split("  ")[1] for event in events] == [
        "created",
        "leased by actor-0",
        "came home, sampled by version 0",
        "claimed for step 2 at version 1",
        "dropped: poisoned",
    ]
    kept = tmp_path / "poison"
    assert argosy("ledger", "show", "1/0", *run, "--save", str(kept)).returncode == 0
    assert unpack(kept.read_bytes()).attempt == "1/0"
    assert json.loads(argosy("ledger", "show", "0/0", *run, "--json").stdout)["state"] == "trained:1"


def test_what_is_not_there_is_said(run: list[str], tmp_path: Path) -> None:
    missing = argosy("ledger", "show", "99/0", *run)
    assert (missing.returncode, missing.stderr) == (1, "argosy: there is no attempt '99/0' in this run\n")
    nothing = argosy("ledger", "show", "0/0", *run, "--save", str(tmp_path / "x"))
    assert nothing.returncode == 1 and "nothing is kept aside" in nothing.stderr
    assert "no such command" not in argosy("ledger", "nonsense").stderr.lower()
