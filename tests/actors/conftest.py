"""One small model and one real SGLang server for all tests of the actors."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from argosy.actors.chat import Chat
from argosy.actors.settings import ActorConfig, TaskSource
from argosy.actors.worker import Worker
from argosy.buffer import BufferSettings, Ledger, ReplayBuffer, Trajectory, WeightLedger
from argosy.learner.scratch import make_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `arena`

CORPUS = [
    "<|im_start|>system\nGuess the number.<|im_end|>\n<|im_start|>user\nIt is below 10.<|im_end|>\n",
    '<tool_call>\n{"name": "guess", "arguments": {"number": 5}}\n</tool_call><|im_end|>\n',
    "<|im_start|>tool\n<tool_response>\nhigher\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
] * 20


START_SECONDS = 200  # SGLang takes 15 to 30 s, and far longer on a machine that is busy with other things


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the engine, within its own time."""
    for item in items:
        if HERE in item.path.parents:
            marker = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout((marker.args[0] if marker else 60) + START_SECONDS), append=False)


class Process:
    """`python -m argosy.actors ROLE CONFIG.json`, with its output in a file."""

    def __init__(self, role: str, config: ActorConfig, *options: str) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        file = config.run_dir / f"{config.name}.json"
        file.write_text(config.model_dump_json())
        self.output = config.run_dir / f"{config.name}.out"
        command = [sys.executable, "-m", "argosy.actors", role, str(file), *options]
        with self.output.open("ab") as out:
            self.popen = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(HERE)}
            )

    def __str__(self) -> str:
        return self.output.read_text()

    def wait(self, seconds: float) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.popen.args} still runs after {seconds} s:\n{self}")

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(15)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts processes that do not outlive the test."""
    processes: list[Process] = []

    def begin(role: str, config: ActorConfig, *options: str) -> Process:
        processes.append(Process(role, config, *options))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), CORPUS, vocab=300, hidden=64, initializer_range=0.2)


@pytest.fixture(scope="session")
def chat(model: Path) -> Chat:
    return Chat(model)


@pytest.fixture(scope="session")
def forgetful(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Drops what assistants said before the last tool answer, as templates that strip earlier thoughts do."""
    folder = tmp_path_factory.mktemp("forgetful")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Chat(folder)


@pytest.fixture(scope="session")
def engine_config(redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> ActorConfig:
    return ActorConfig(
        run_dir=tmp_path_factory.mktemp("engine"),
        model=model,
        buffer=BufferSettings(run=f"engine-{os.getpid()}", url=redis_url, batch_size=4),
        engine={"start_seconds": START_SECONDS},
        name="engine-0",
    )


@pytest.fixture(scope="session")
def engine(engine_config: ActorConfig) -> Iterator[Process]:
    """The engine server's process; it serves the run that `engine_config` names."""
    process = Process("engine", engine_config)
    try:
        wait_for_engine(engine_config, process)
        yield process
        # The end of the session is a test of its own: SGLang is killed, its server says so and leaves nothing.
        traces = Traces(process)
        assert traces.ports and not traces.shared_memory and len(processes_of(traces.sglang)) >= 3
        os.kill(traces.sglang, signal.SIGKILL)
        assert process.wait(10) == 1
        assert "SGLang ended with -9" in str(process) and "engine-0.log ends with" in str(process)
        assert not traces.left() and not WeightLedger(engine_config.buffer).engines()
    finally:
        process.end()


@pytest.fixture
def config(engine: Process, engine_config: ActorConfig, run_name: str, redis_url: str, tmp_path: Path) -> ActorConfig:
    """A run of the test's own, which the session's engine serves as well."""
    record = WeightLedger(engine_config.buffer).engines()[engine_config.name]
    buffer = BufferSettings(run=run_name, url=redis_url, batch_size=8, lease_seconds=3)
    WeightLedger(buffer).register_engine("shared", record.url, ttl=1000, version=record.version)
    return ActorConfig(
        run_dir=tmp_path,
        model=engine_config.model,
        buffer=buffer,
        actor={"concurrency": 4, "max_new_tokens": 16, "context_tokens": 512},
        sources=[{"name": "guess", "env": "arena:Guess"}],
    )


def wait_for_engine(config: ActorConfig, process: Process, seconds: float = START_SECONDS) -> None:
    ledger = WeightLedger(config.buffer)
    wait_until(lambda: process.popen.poll() is not None or config.name in ledger.engines(), seconds, str(process))
    assert process.popen.poll() is None, f"the engine ended:\n{process}"


def wait_until(condition: Callable[[], object], seconds: float, what: object = "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s: {what}"
        time.sleep(0.05)


def last_line(config: ActorConfig, actor: str) -> dict[str, Any]:
    """What an actor last reported."""
    return json.loads((config.run_dir / "actors" / f"{actor}.jsonl").read_text().splitlines()[-1])


def run_worker(config: ActorConfig, seconds: float) -> Worker:
    async def run() -> Worker:
        worker = Worker(config)
        asyncio.get_running_loop().call_later(seconds, worker.stop)
        await worker.run()
        return worker

    return asyncio.run(run())


def changed(
    config: ActorConfig, *, env: str = "arena:Guess", kwargs: dict | None = None, **actor: object
) -> ActorConfig:
    source = TaskSource(name="guess", env=env, kwargs=kwargs or {})
    return config.model_copy(update={"sources": (source,), "actor": config.actor.model_copy(update=actor)})


def ledger_of(config: ActorConfig) -> Ledger:
    return ReplayBuffer(config.buffer).ledger()


def ready(config: ActorConfig) -> list[Trajectory]:
    """Every trajectory that came home, as a learner with batches of one would get them."""
    buffer = ReplayBuffer(config.buffer.model_copy(update={"batch_size": 1}))
    steps = itertools.takewhile(lambda ids: ids is not None, map(buffer.claim, itertools.count(1)))
    return [trajectory for ids in steps for trajectory in buffer.get(ids or [])]


def processes_of(session: int) -> list[str]:
    """Command names of the living processes of a session; zombies that nobody reaps do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        state, _, _, sid = rest.split()[:4]
        if int(sid) == session and state != "Z":
            found.append(name)
    return found


class Traces:
    """All that an engine server leaves on the machine while it lives."""

    def __init__(self, server: Process) -> None:
        self._server = psutil.Process(server.popen.pid)
        wait_until(lambda: self._child("sglang_launch") and self._child("argosy-janitor"), 20, server)
        self.sglang, janitor = self._child("sglang_launch")[0].pid, self._child("argosy-janitor")[0]
        self.sessions = self.sglang, janitor.pid
        self.scratch = Path(janitor.cmdline()[-1])
        assert self.scratch.parent == Path(tempfile.gettempdir()) and self.scratch.exists()
        self.ports = {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN" and self._owns(c.pid)}
        self.shared_memory = shared_memory(self.sglang)

    def left(self) -> list[object]:
        listening = [c for c in psutil.net_connections() if c.status == "LISTEN" and c.laddr.port in self.ports]
        processes = [name for session in self.sessions for name in processes_of(session)]
        files = [path for path in [self.scratch, *self.shared_memory] if path.exists()]
        return [*processes, *files, *listening]

    def _child(self, word: str) -> list[psutil.Process]:
        return [child for child in self._server.children() if any(word in part for part in child.cmdline())]

    def _owns(self, pid: int | None) -> bool:
        return pid is not None and psutil.pid_exists(pid) and os.getsid(pid) == self.sglang


def shared_memory(session: int) -> list[Path]:
    """Files in /dev/shm that a process of the session has open or mapped."""
    found = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found |= {Path(area.path) for area in process.memory_maps() if area.path.startswith("/dev/shm/")}
        except (psutil.Error, ProcessLookupError):
            continue
    return [path for path in found if path.exists()]
