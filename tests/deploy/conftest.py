"""Real runs of `argosy train`, small enough to test with, watched from outside as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from argosy.deploy.paths import RunPaths

SMALL = [  # the demo, with less of everything
    "demonstrations=2500",
    "learner.supervised.steps=700",
    "learner.value.batches=4",
    "learner.checkpoint_every=10",
    "evaluation.0.episodes=128",
]


STARTED: list["subprocess.Popen[str]"] = []


@dataclass
class Train:
    """One run, started as often as a test likes; always from the same folder with the same command."""

    folder: Path
    name: str
    overrides: list[str]
    process: subprocess.Popen[str] | None = field(default=None)

    @property
    def root(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self) -> None:
        command = [sys.executable, "-m", "argosy.deploy.cli", "train", "demo", f"name={self.name}", *self.overrides]
        with (self.folder / f"{self.name}.out").open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, text=True, start_new_session=True
            )
        STARTED.append(self.process)

    def until(self, what: str, ready: Callable[[], Any], seconds: float) -> None:
        """Waits for something to become true of the running run."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.process is not None and self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.output()}"
            time.sleep(0.1)

    def end(self, seconds: float) -> int:
        """Waits for the command to end and returns its exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def output(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()[-4000:]

    def lines(self, file: str) -> list[dict[str, Any]]:
        path = self.root / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, stage: str = "policy") -> list[dict[str, Any]]:
        """The learner's records of a stage; a step that was done again counts once."""
        return list(
            {record["step"]: record for record in self.lines("metrics.jsonl") if record["stage"] == stage}.values()
        )

    def restarted(self, process: str) -> bool:
        return any(note["event"] == "restarted" and note["process"] == process for note in self.lines("journal.jsonl"))

    def processes(self) -> dict[int, str]:
        """Every process that belongs to this run, sandboxes and all: by its command line, folder or environment."""
        return processes_about(str(self.root), str(RunPaths(self.root).redis_socket))

    def kill(self, *parts: str) -> None:
        """kill -9 of the process of this run whose command line has all the parts."""
        victims = [pid for pid, command in self.processes().items() if all(part in command for part in parts)]
        assert victims, f"no process of the run has {parts}: {self.processes()}"
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    def ledger(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "argosy.deploy.cli", "ledger", "demo", f"name={self.name}", *self.overrides]
        ended = subprocess.run([*command, "--json"], cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


def processes_about(*names: str) -> dict[int, str]:
    """Processes of which the command line, or one of their session, has one of the names; not zombies."""
    about, sessions, found = set(), {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if state == "Z" or int(folder.name) == os.getpid():
            continue
        sessions[int(folder.name)] = (int(session), command)
        if any(name in command for name in names):
            about.add(int(session))
    for pid, (session, command) in sessions.items():
        if session in about:
            found[pid] = command
    return found


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a space in its path, and too deep for a unix socket. What still runs in it at the end is killed."""
    folder = tmp_path_factory.mktemp("a work place") / ("deep" * 20)
    folder.mkdir()
    yield folder
    for process in STARTED:
        process.kill()
