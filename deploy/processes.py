"""The processes of a run: started, kept alive, ended.

Invariant: no process outlives the supervisor. Each is the leader of its own session (so a Ctrl-C in the terminal
reaches the supervisor alone, and the whole family can be ended at once) and asks the kernel for a signal when the
supervisor dies, however it dies.
"""

import asyncio
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1
DEATHS = 3  # of one process within DEATHS_WITHIN end the run
DEATHS_WITHIN = 600.0
BACKOFF = (1.0, 4.0)  # seconds before a process is started again after its first and second death
LAST_LINES = 15
# Without root, redis-server and bwrap are installed beside the interpreter.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class RunFailed(RuntimeError):
    """The run cannot go on; the message says who ended, and why."""


@dataclass
class Process:
    """One process of the run, by name; `keep` starts it again when it dies."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    orphaned: signal.Signals = signal.SIGKILL
    """What the kernel sends it when the supervisor is gone."""
    may_end: bool = False
    """Whether ending with 0 is its success; for what serves until it is stopped it is a death like any other."""
    prepare: Callable[[], None] = lambda: None
    """Done before each start."""
    on_death: Callable[[str, str], None] = lambda name, reason: None
    _child: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _log_begin: int = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child and self._child.returncode is None else None

    async def keep(self) -> None:
        """Runs it until it is stopped, or has done what it may end with; `RunFailed` when it keeps dying."""
        deaths: list[float] = []
        while not self._stopping:
            code = await self.run()
            if self._stopping or (code == 0 and self.may_end):
                return
            deaths = [died for died in deaths if time.monotonic() - died < DEATHS_WITHIN] + [time.monotonic()]
            if len(deaths) >= DEATHS:
                raise RunFailed(
                    f"{self.name} ended {DEATHS} times within {DEATHS_WITHIN / 60:.0f} minutes, at last with "
                    f"{_meaning(code)}. {self.last_words()}"
                )
            self.on_death(self.name, _meaning(code))
            await asyncio.sleep(BACKOFF[len(deaths) - 1])

    async def run(self) -> int:
        """Runs it once and returns its exit code, -N for signal N. Its family ends with it, or when cancelled."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self.prepare)
        supervisor = os.getpid()
        with self.log.open("ab") as output:
            self._log_begin = output.tell()
            child = self._child = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
                preexec_fn=lambda: _follow_into_death(supervisor, self.orphaned),
            )
        if self._stopping:  # we were asked to while it was starting
            self.kill()
        try:
            return await child.wait()
        finally:
            _end_family(child.pid)
            self._child = None  # its number may soon be somebody else's
            await child.wait()

    async def stop(self, seconds: float) -> bool:
        """Asks it to end (SIGTERM) and kills its family if it has not after so many seconds; True if it had."""
        self._stopping = True
        if (child := self._child) is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), seconds)
        except TimeoutError:
            self.kill()
            await child.wait()
            return False
        return True

    def kill(self) -> None:
        """Ends its family at once."""
        self._stopping = True
        if self._child is not None:
            _end_family(self._child.pid)

    def last_words(self) -> str:
        return _end_of(self.log, self._log_begin)


def python(name: str, *arguments: str, log: Path, **options: object) -> Process:
    """A process that runs a module of Argosy with this interpreter."""
    return Process(name, [sys.executable, "-m", *arguments], log, **options)  # type: ignore[arg-type]


def redis_server(folder: Path, socket: Path, log: Path, memory_bytes: int = 0) -> Process:
    """A Redis of the run's own: on a unix socket, with an append-only file, refusing writes when `memory_bytes` are
    used (0: no limit).

    Orphaned, it gets a SIGTERM: it then writes what it has to disk and removes its socket.
    """
    server = shutil.which("redis-server", path=SEARCH_PATH)
    if server is None:
        raise RunFailed("redis-server is not installed: run `make install`, or give buffer.url of a Redis you have")
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "noeviction",
        "hash-max-listpack-value": "256",  # the history of an attempt with a long story stays small
        "hash-max-listpack-entries": "64",  # that many attempts share a history; in larger hashes a search takes longer
        "zset-max-listpack-entries": "0",  # a batch enters a skiplist in a fifth of the time
    }
    command = [server, *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Process("redis", command, log, orphaned=signal.SIGTERM, prepare=partial(_mend, server, folder, log))


def _mend(server: str, folder: Path, log: Path) -> None:
    """Cuts a transaction that a power loss tore from the end of the append-only file.

    Redis loads such a file without it, but leaves the torn part in place, and takes it for whole at the start after.
    The server's binary is the checker when it is called by the checker's name.
    """
    for manifest in folder.glob("appendonlydir/*.manifest"):
        with log.open("ab") as output:
            command = ["redis-check-aof", "--fix", str(manifest)]
            code = subprocess.run(command, executable=server, input=b"y\n", stdout=output, stderr=output).returncode
        if code != 0:
            raise RunFailed(f"Redis' file cannot be mended ({shlex.join(command)}: {_meaning(code)}). {_end_of(log)}")


def _end_of(log: Path, begin: int = 0) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().splitlines()[-LAST_LINES:]
    return f"{log} ends with:\n" + b"\n".join(lines).decode(errors="replace")


def _end_family(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _follow_into_death(parent: int, with_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _meaning(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
