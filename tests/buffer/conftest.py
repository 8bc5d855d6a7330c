"""A real Redis that a test may kill, and trajectories small enough to make thousands of."""

import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from argosy.buffer import BufferSettings, Lease, ReplayBuffer, Task, Trace, Trajectory, Turn
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


class RedisServer:
    """A redis-server of the test's own, which it may kill and start again on the same files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, repair: bool = True) -> "RedisServer":
        server = shutil.which("redis-server")
        assert server, "redis-server is missing: run `make install`"
        if repair:
            self._drop_torn_transaction(server)
        files = ["--dir", str(self.folder), "--appendonly", "yes", "--save", ""]
        command = [server, "--port", "0", "--unixsocket", str(self.socket), *files, *options]
        # signals as Python has them: a full disk, made with a limit on the file's size, must not be a SIGXFSZ
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, restore_signals=False)
        deadline = time.monotonic() + 20
        while not self._answers():
            assert self.process.poll() is None, f"redis-server ended at once: {' '.join(command)}"
            assert time.monotonic() < deadline, f"redis-server did not answer on {self.socket} within 20 s"
            time.sleep(0.01)
        return self

    def kill(self, written: bool = True) -> None:
        """With SIGKILL. Unless `written`, two seconds of what was acknowledged may be lost: while its disk is slow,
        Redis holds back what it would write."""
        if self.process is not None:
            while written and self.client().info("persistence")["aof_buffer_length"]:
                time.sleep(0.01)
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def fill_disk(self, left: int) -> None:
        """From `left` more bytes on, the append-only file cannot be written."""
        self._limit_file(self.tail().stat().st_size + left)

    def free_disk(self) -> None:
        self._limit_file(resource.RLIM_INFINITY)

    def _limit_file(self, size: int) -> None:
        assert self.process is not None
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def tail(self) -> Path:
        """Where the append-only file grows."""
        files = (self.folder / "appendonlydir").glob("*.incr.aof")  # appendonly.aof.7.incr.aof
        return max(files, key=lambda path: int(path.name.split(".")[2]))

    def lose_tail(self, n_bytes: int) -> None:
        """What a power cut does to an append-only file that is synced once a second."""
        tail = self.tail()
        with tail.open("r+b") as file:
            file.truncate(max(0, tail.stat().st_size - n_bytes))

    def _drop_torn_transaction(self, server: str) -> None:
        """redis-server alone cuts only the torn command, and applies the transaction before it at the next restart."""
        for manifest in (self.folder / "appendonlydir").glob("*.manifest"):
            command = ["redis-check-aof", "--fix", str(manifest)]  # one binary, told apart by its name
            subprocess.run(command, executable=server, input=b"y\n", stdout=subprocess.DEVNULL, check=True, timeout=20)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def _answers(self) -> bool:
        try:
            return self.socket.exists() and bool(self.client().ping())
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="argosy-test-redis-"))
    server = RedisServer(folder)
    try:
        yield server.start()
    finally:
        server.kill(written=False)
        shutil.rmtree(folder, ignore_errors=True)  # a child of the killed server may still be tidying up in it


@pytest.fixture
def make_settings(redis_url: str, run_name: str) -> Callable[..., BufferSettings]:
    def make(**changes: object) -> BufferSettings:
        return BufferSettings.model_validate({"run": run_name, "url": redis_url, "batch_size": 2, "eta": 1} | changes)

    return make


@pytest.fixture
def make_buffer(make_settings: Callable[..., BufferSettings]) -> Iterator[Callable[..., ReplayBuffer]]:
    opened = []

    def make(**changes: object) -> ReplayBuffer:
        opened.append(ReplayBuffer(make_settings(**changes)))
        return opened[-1]

    yield make
    for buffer in opened:
        buffer.close()


@pytest.fixture(scope="session")
def task() -> Callable[[int], Task]:
    return lambda index: Task(f"repair/{index}", "repair" if index % 3 else "count", index)


@pytest.fixture(scope="session")
def bring() -> Callable[..., Trajectory]:
    """The trajectory a worker brings home for a lease: some tokens sampled by `version`."""

    def make(lease: Lease, version: int = 0, length: int = 12) -> Trajectory:
        sampled = np.arange(length) % 3 == 2
        trace = Trace(
            tokens=np.arange(length),
            sampled=sampled,
            logprobs=np.where(sampled, -0.5, 0.0),
            versions=np.where(sampled, version, -1),
            rewards=[(length - 1, 1.0)],
            turns=[Turn(1, 3, "user"), Turn(4, length, "assistant", seconds=0.1)],
        )
        return Trajectory(
            id=f"{lease.attempt}@{lease.tries}",
            attempt=lease.attempt,
            task=lease.task,
            group=lease.group,
            group_size=lease.group_size,
            group_index=lease.group_index,
            env="argosy/repair",
            status="terminated",
            reward=1.0,
            reward_parts={"tests": 1.0},
            traces=[trace],
            sampling={"temperature": 1.0},
        )

    return make
