"""A control group around a sandbox, where this process may make one (as root): v1 or v2, whichever is mounted.

Invariant: the group bounds what the guest cannot: processor time, and memory against whatever happens between two of
its looks. It is removed with its sandbox, or by the next process that makes one after its owner was killed.
"""

import functools
import itertools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from .owners import Owner
from .spec import Limits

_PREFIX = "argosy-"
_JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
_PERIOD = 100_000  # microseconds
_OWN = 128 * 2**20  # bytes for bubblewrap, the guest and the kernel's bookkeeping

_log = logging.getLogger(__name__)
_numbers = itertools.count()
_dead: "set[Group]" = set()


@dataclass(frozen=True)
class Group:
    """Its folders: one in all with v2, one for each controller ("memory", "cpu") with v1."""

    folders: tuple[Path, ...]

    @property
    def join(self) -> list[str]:
        """A command's beginning: it is run in the group."""
        return ["/bin/sh", "-c", _JOIN, "join", *map(str, self.folders), "--"]

    def oom_kills(self) -> int:
        """How often the kernel killed one of its processes for memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                if (file := folder / name).exists():
                    return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0))
        return 0

    def remove(self) -> bool:
        """Whether it is gone; if not, the kernel holds its last processes, and it goes with a later one."""
        _dead.add(self)
        for group in list(_dead):
            left = [folder for folder in group.folders if not _removed(folder)]
            if not left:
                _dead.discard(group)
        return self not in _dead


def create(limits: Limits) -> Group | None:
    """A group with these limits; None where there can be none, and says once what that means."""
    wanted = ["memory", *(["cpu"] if limits.cpus is not None else [])]
    parents = {name: parent for name, parent in _parents().items() if name in wanted}
    if "cpu" in wanted and "cpu" not in parents:
        _say_once("cpus of sandboxes are a hint here, and not enforced: that takes root and a writable cgroup")
    name = f"{_PREFIX}{Owner.here()}-{next(_numbers)}"
    folders = tuple(dict.fromkeys(parent / name for parent in parents.values()))
    try:
        for folder in folders:
            folder.mkdir()
        for controller, parent in parents.items():
            _limit(controller, parent / name, limits)
    except OSError as error:
        _say_once(f"sandboxes are not in control groups here, cpus not enforced: {error}")
        for folder in folders:
            _removed(folder)
        return None
    return Group(folders) if folders else None


@functools.cache
def _say_once(text: str) -> None:
    _log.warning(text)


def _limit(controller: str, folder: Path, limits: Limits) -> None:
    memory = limits.memory + 2 * limits.disk + limits.file_size + _OWN  # files live in memory, too
    quota = int((limits.cpus or 1) * _PERIOD)
    unified = (folder / "cgroup.controllers").exists()
    values: dict[str, str | int]
    if controller == "memory":
        values = {"memory.max": memory, "memory.swap.max": 0}
        if not unified:
            values = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
    elif unified:
        values = {"cpu.max": f"{quota} {_PERIOD}"}
    else:
        values = {"cpu.cfs_period_us": _PERIOD, "cpu.cfs_quota_us": quota}
    for file, value in values.items():
        if (folder / file).exists():  # not every kernel accounts for swap
            (folder / file).write_text(str(value))


@functools.cache
def _parents() -> dict[str, Path]:
    """The folder for new groups, by controller; groups whose owner is gone are removed from them."""
    found = _unified() or _by_controller()
    _reap(found)
    return found


def reap() -> list[str]:
    """Remove the groups whose owner is gone: their folders."""
    return _reap(_unified() or _by_controller())


def _reap(parents: dict[str, Path]) -> list[str]:
    abandoned = []
    for parent in set(parents.values()):
        for folder in parent.glob(f"{_PREFIX}*.*-*"):
            if Owner.parse(folder.name.removeprefix(_PREFIX).rpartition("-")[0]).gone and _removed(folder):
                abandoned.append(str(folder))
    return abandoned


def _unified() -> dict[str, Path]:
    """v2: the nearest group from ours upwards that hands controllers on to its children."""
    for mount, root in _mounts("cgroup2"):
        own = _below(mount, root, _own_path(""))
        for folder in (own, *own.parents):
            control = folder / "cgroup.subtree_control"
            if not control.exists():
                break
            offered = control.read_text().split()
            if "memory" in offered and os.access(folder, os.W_OK):
                return {name: folder for name in ("memory", "cpu") if name in offered}
    return {}


def _by_controller() -> dict[str, Path]:
    """v1: beneath our own group of each controller."""
    found = {}
    for controller in ("memory", "cpu"):
        for mount, root in _mounts("cgroup", controller):
            folder = _below(mount, root, _own_path(controller))
            if os.access(folder, os.W_OK):
                found[controller] = folder
    return found


def _mounts(kind: str, option: str = "") -> list[tuple[Path, Path]]:
    """Where such a file system is mounted, and which of its folders that shows."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind_here, _, options = right.split(" ", 2)
        if kind_here == kind and (not option or option in options.split(",")):
            found.append((Path(left.split()[4]), Path(left.split()[3])))
    return found


def _below(mount: Path, root: Path, path: Path) -> Path:
    """Where a mount, which shows what is under `root`, shows this group; in a container they may not fit."""
    return mount / path.relative_to(root) if path.is_relative_to(root) else mount


def _own_path(controller: str) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path)
    return Path("/")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # its last process is still on the way out
        return False
    return True
