"""Real bubblewrap sandboxes; each test has its own event loop."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import Sandbox

from . import docker_engine

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


@pytest.fixture(scope="session")
def docker_image() -> Iterator[str]:
    """The name of an image at a real Docker engine, which DOCKER_HOST names from now on."""
    try:
        with docker_engine.engine() as address:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DOCKER_HOST", address)
                yield docker_engine.IMAGE
    except docker_engine.NoEngine as error:
        assert os.geteuid() != 0 or not Path("/etc/debian_version").exists(), error
        pytest.skip(str(error))


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


@pytest.fixture(scope="session")
def neighbours() -> Path:
    """An interpreter with the other frameworks of neighbours.txt, made anew when that changes (a minute or two)."""
    wanted = Path(__file__).with_name("neighbours.txt")
    home = Path(sys.prefix) / "neighbours"
    python, done = home / "bin" / "python", home / "done"
    if not done.exists() or done.read_text() != wanted.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, timeout=120)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", str(wanted)], check=True, timeout=900)
        done.write_text(wanted.read_text())
    return python
