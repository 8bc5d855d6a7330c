"""Which sandboxes there are on this machine and engine, and the end of those that belong to nobody.

Invariant: what a living owner holds is never touched, whosever it is, unless it is asked for by its run's name. What a
process killed with -9 left behind is gone soon after the next one opens a sandbox of Docker; bubblewrap's end with
their owner.
"""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import SandboxUnavailable
from . import cgroup
from .owners import RUN

_INTERVAL = 300.0  # seconds
_log = logging.getLogger(__name__)
_last = float("-inf")


@dataclass(frozen=True)
class Held:
    """A sandbox, or a control group that one left."""

    backend: str
    id: str
    run: str = ""
    owner: int = 0
    """Process id; 0 where it is on another machine."""
    image: str = ""
    age: float = 0.0
    abandoned: bool = False


def held(docker: bool = True) -> list[Held]:
    """All there are; `SandboxUnavailable` where `docker` is asked for and does not answer."""
    return [*_bubblewrap(), *(_docker() if docker else [])]


def reap(run: str | None = None, docker: bool = True) -> list[Held]:
    """Remove what belongs to nobody, and with `run` all that belongs to it; returns what was removed."""
    from . import containers

    removed = [Held("bubblewrap", folder, abandoned=True) for folder in cgroup.reap()]
    for one in held(docker):
        if not (one.abandoned or (run is not None and one.run == run)):
            continue
        if one.backend == "docker":
            containers.remove(one.id)
        else:
            os.kill(int(one.id), signal.SIGKILL)
        removed.append(one)
    return removed


def reap_sometimes() -> None:
    """In a thread: the first time, and then when some minutes have passed."""
    global _last
    if time.monotonic() - _last > _INTERVAL:
        _last = time.monotonic()
        threading.Thread(target=_reap_and_tell, daemon=True).start()


def _reap_and_tell() -> None:
    try:
        removed = reap()
    except (SandboxUnavailable, OSError) as error:  # OSError: also what the engine's library raises on its way out
        _log.warning("sandboxes that nobody owns could not be looked for: %s", error)
        return
    if removed:
        _log.warning("removed %d sandboxes of processes that are gone", len(removed))


def _docker() -> list[Held]:
    from . import containers
    from .owners import Owner

    here = Owner.here()
    return [
        Held(
            "docker",
            found.id,
            found.run,
            found.owner.pid if (found.owner.boot, found.owner.namespace) == (here.boot, here.namespace) else 0,
            found.image,
            time.time() - found.created,
            found.abandoned,
        )
        for found in containers.find()
    ]


def _bubblewrap() -> list[Held]:
    """Found by their command lines; each is a child of its owner, and dies with it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = _command(process)
            if Path(words[0]).name != "bwrap" or "/.sandbox" not in words:
                continue
            owner = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if Path(_command(Path(f"/proc/{owner}"))[0]).name == "bwrap":
                continue  # its inner half
            variables = dict(
                line.split("=", 1) for line in Path(f"/proc/{owner}/environ").read_text().split("\0") if "=" in line
            )
            age = time.time() - process.stat().st_mtime
        except (OSError, ValueError):  # ended while we looked, or another user's
            continue
        found.append(Held("bubblewrap", process.name, variables.get(RUN, ""), owner, age=age))
    return found


def _command(process: Path) -> list[str]:
    return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
