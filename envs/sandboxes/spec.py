"""What a sandbox is asked for, and what a command in it comes to: plain records, the same for every back end."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox. Deadlines belong to the calls."""

    memory: int = 512 * 2**20
    """Bytes of all processes together; beyond it everything is killed and the reason is "oom"."""

    processes: int = 64
    """Processes and threads at once."""

    file_size: int = 64 * 2**20
    """Bytes of the largest file."""

    disk: int = 256 * 2**20
    """Bytes of what may be written, all places together, and as much again in /dev/shm (bubblewrap: in memory)."""

    output: int = 64 * 2**10
    """Bytes kept of a command's output, half from its start and half from its end; and of `run_python`'s results."""

    cpus: float | None = None
    """Processors' worth of time; None: as the machine gives. Only a hint where no control group can be made."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class SandboxSpec:
    """Which sandbox: sandboxes of equal specs can stand in for each other, so pools are kept by them."""

    backend: Literal["bubblewrap", "docker"] = "bubblewrap"

    image: str | None = None
    """Docker: a tag ("python:3.12"), the path of an image's tar, or of a folder with a Dockerfile."""

    workdir: str = "/workspace"
    """Where commands start and relative paths count from; it is made if it is not there."""

    limits: Limits = DEFAULT_LIMITS

    network: tuple[str, ...] = ()
    """Hosts that may be reached over http and https, such as "pypi.org"; ("*",) is any, and none is the default."""

    environment: tuple[tuple[str, str], ...] = ()
    """Variables of every command, besides PATH, HOME and LANG."""

    user: str | None = None
    """Docker: whom commands run as, such as "1000:1000"; None: the image's own user."""

    read_only: bool = False
    """Docker: nothing can be written but the workdir, /tmp and /var/tmp, which are in memory and bounded by `disk`."""


DEFAULT_SPEC = SandboxSpec()


@dataclass(frozen=True)
class Result:
    """How a command ended: `exit` as a shell tells it (128 + signal), `reason` None when it ended by itself."""

    exit: int
    output: str
    truncated: bool = False
    reason: Literal["timeout", "oom", "killed"] | None = None


@dataclass(frozen=True)
class Outcome:
    """One call of `run_python`: a JSON value, or an `error` such as "ZeroDivisionError: division by zero"."""

    value: Any = None
    error: str | None = None
