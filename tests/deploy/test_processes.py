"""Real little processes: which end is a death, who ends with whom, and what a death says."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from argosy.buffer import BufferSettings, ReplayBuffer
from argosy.deploy import processes
from argosy.deploy.cli import _forget
from argosy.deploy.paths import RunPaths
from argosy.deploy.processes import Process, RunFailed, redis_server
from argosy.deploy.recipe import load

SERVE_UNTIL_TERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready")
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BACKOFF", (0.01, 0.01))


def little(tmp_path: Path, code: str, **options: object) -> Process:
    return Process("little", [sys.executable, "-c", code], tmp_path / "little.log", **options)  # type: ignore[arg-type]


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not ready():
            await asyncio.sleep(0.01)


def test_what_serves_is_started_again_after_a_plain_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        deaths = []
        process = little(tmp_path, SERVE_UNTIL_TERM, on_death=lambda *death: deaths.append(death))
        keeper = asyncio.create_task(process.keep())
        await until(lambda: process.log.exists() and process.log.read_text().count("ready") == 1)
        os.kill(process.pid or 0, signal.SIGTERM)
        await until(lambda: process.log.read_text().count("ready") == 2)
        assert deaths == [("little", "exit code 0")]
        assert await process.stop(5)
        await keeper
        assert process.pid is None

    asyncio.run(scenario())


def test_what_may_end_ends_with_0_and_is_started_again_after_anything_else(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    code = f"import pathlib, sys; p = pathlib.Path({str(mark)!r}); sys.exit(0 if p.exists() else p.touch() or 3)"
    deaths: list[tuple[str, str]] = []
    asyncio.run(little(tmp_path, code, may_end=True, on_death=lambda *death: deaths.append(death)).keep())
    assert deaths == [("little", "exit code 3")]


def test_the_third_death_ends_the_run_and_shows_the_last_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"little ended 3 times .* exit code 1\. .*little\.log ends with:\nno luck"):
        asyncio.run(little(tmp_path, "import sys; sys.exit('no luck')", may_end=True).keep())


def test_a_family_ends_with_its_head_and_its_number_is_forgotten(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    process = little(tmp_path, code, may_end=True)
    asyncio.run(process.keep())
    child = Path("/proc") / process.log.read_text().strip()
    deadline = time.monotonic() + 5
    while child.exists() and child.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)
    assert process.pid is None
    process.kill()  # nobody's


def test_one_that_does_not_listen_is_killed_and_says_so(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"

    async def scenario() -> None:
        process = little(tmp_path, code)
        keeper = asyncio.create_task(process.keep())
        await until(lambda: process.log.exists() and process.log.read_text())
        assert not await process.stop(0.1)
        await keeper

    asyncio.run(scenario())


def test_programs_beside_the_interpreter_are_found(tmp_path: Path) -> None:
    process = little(tmp_path, "import os; print(os.environ['PATH'])", may_end=True)
    asyncio.run(process.keep())
    assert process.log.read_text().startswith(str(Path(sys.executable).parent) + os.pathsep)


def test_a_file_of_redis_that_cannot_be_mended_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("file gone.aof seq 1 type i\n")
    with pytest.raises(RunFailed, match=r"cannot be mended \(redis-check-aof .*redis\.log ends with"):
        asyncio.run(redis_server(folder, folder / "redis.sock", tmp_path / "redis.log").keep())


def test_the_ledger_wakes_a_redis_that_was_killed(tmp_path: Path) -> None:
    """It left its socket behind."""
    paths = RunPaths(tmp_path / "runs" / "demo")
    paths.redis.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(paths.redis_socket))
    command = [sys.executable, "-m", "argosy.deploy.cli", "ledger", "demo", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["created"] == 0
    assert not paths.redis_socket.exists()


def test_a_run_in_a_shared_redis_is_its_own_until_it_is_forgotten(
    tmp_path: Path, redis_url: str, run_name: str
) -> None:
    """Somebody has the name there already: the run says so and ends, and begins with --fresh."""
    settings = BufferSettings(run=run_name, url=redis_url, batch_size=1)
    ReplayBuffer(settings).claim_run("somebody")
    command = [
        sys.executable,
        "-m",
        "argosy.deploy.cli",
        "train",
        "demo",
        f"name={run_name}",
        f"buffer.url={redis_url}",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert f"already holds another run '{run_name}'" in ended.stderr and "--fresh" in ended.stderr
    assert "Traceback" not in ended.stderr
    recipe, paths = load("demo", command[5:], runs=tmp_path / "runs")
    _forget(recipe, paths)
    ReplayBuffer(settings).claim_run("the run")
    assert not paths.root.exists()


@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_is_respected(tmp_path: Path, ignored: bool) -> None:
    """A run under nohup goes on after a SIGHUP; another one drains."""
    hangup = "--ignore-signal=HUP" if ignored else "--default-signal=HUP"
    command = ["env", hangup, sys.executable, "-m", "argosy.deploy.cli", "train", "demo"]
    with (tmp_path / "out").open("w") as output:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True)
    try:
        log = tmp_path / "runs" / "demo" / "logs" / "model.log"
        deadline = time.monotonic() + 30
        while not log.exists():
            assert time.monotonic() < deadline and run.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        run.send_signal(signal.SIGHUP)
        if ignored:
            time.sleep(1)
            assert run.poll() is None
            run.terminate()
            run.terminate()  # only a second Ctrl-C is impatient
        assert run.wait(15) == 130
        assert "Interrupted; all is saved" in (tmp_path / "out").read_text()
    finally:
        run.kill()
