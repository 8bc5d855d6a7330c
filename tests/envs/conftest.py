"""Real bubblewrap sandboxes; each test has its own event loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import Sandbox

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def sandbox(run: Run) -> Iterator[Sandbox]:
    opened = run(Sandbox.open())
    yield opened
    run(opened.close())


@pytest.fixture
def processes_with() -> Callable[[str], list[str]]:
    """Command lines on this machine that hold a text."""

    def find(text: str) -> list[str]:
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if text in line:
                found.append(line)
        return found

    return find


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds, with a deadline."""

    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"did not become true within {seconds} s"
            time.sleep(0.02)

    return wait
