"""Who holds a sandbox, in a form that outlives the holder: what is left of a process killed with -9 can be told apart.

Invariant: only what certainly belongs to nobody is removed. An owner is known by process id *and* start time, within
one boot and pid namespace; of an owner elsewhere (another machine, another container) nothing is known, and what it
holds stays until its time is up.
"""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

RUN = "ARGOSY_RUN"  # environment variable: the name of the run that a process belongs to


@dataclass(frozen=True)
class Owner:
    """A process, as text "machine.boot.namespace.pid.started"."""

    machine: str
    boot: str
    namespace: int
    pid: int
    started: int
    """Clock ticks after boot."""

    def __str__(self) -> str:
        return f"{self.machine}.{self.boot}.{self.namespace}.{self.pid}.{self.started}"

    @classmethod
    def parse(cls, text: str) -> "Owner":
        """ValueError when it is none."""
        machine, boot, namespace, pid, started = text.split(".")
        return cls(machine, boot, int(namespace), int(pid), int(started))

    @classmethod
    def here(cls) -> "Owner":
        return _here(os.getpid())

    @property
    def gone(self) -> bool:
        """Certainly."""
        here = self.here()
        if self.machine != here.machine:
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and _started(self.pid) != self.started


@functools.cache
def _here(pid: int) -> Owner:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    started = _started(pid)
    assert started is not None
    return Owner(_machine(), boot, Path("/proc/self/ns/pid").stat().st_ino, pid, started)


def _machine() -> str:
    try:
        found = Path("/etc/machine-id").read_text().strip()
    except OSError:
        found = ""
    return found[:12] or socket.gethostname().replace(".", "-")


def _started(pid: int) -> int | None:
    """None where there is no such process, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def run_name() -> str:
    return os.environ.get(RUN, "")
