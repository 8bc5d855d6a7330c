"""Starting the guest program under bubblewrap, and explaining why that failed.

Invariant: the guest sees /usr and a few files of /etc read-only, its own /proc and /dev, and an empty file system of
bounded size as its root, and nothing else of the host; no network, no capabilities, no user namespaces, and never host
root (root goes through setpriv, because a user namespace alone maps to the one who made it). Its life hangs on the
owner twice: the kernel kills bubblewrap with its parent, and the guest leaves when its socket closes.
"""

import contextlib
import functools
import json
import math
import os
import posixpath
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import SandboxUnavailable
from . import seccomp
from .network import PORT, VARIABLES
from .spec import SandboxSpec

_NOBODY = 65534
_SYSTEM_PYTHON = "/usr/bin/python3"
_GUEST = Path(__file__).with_name("guest")
_INSIDE = "/.sandbox"  # ours: read-only, and a mount, so that it cannot be moved away
_PYTHON_INSIDE = f"{_INSIDE}/python"
_START = f"import sys; sys.path[0] = '{_INSIDE}'; from guest.main import main; del sys.path[0]; main()"
_REQUIRED = ("--as-pid-1", "--disable-userns", "--size", "--perms", "--remount-ro")
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_PROTECTED = ("/.sandbox", "/dev", "/etc", "/proc", "/sys", "/usr", *_SYSTEM_FOLDERS)
_SYSTEM_FILES = (
    "alternatives",
    "ca-certificates",
    "java-*-openjdk",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "os-release",
    "pki",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{_PYTHON_INSIDE}/lib",  # a Python that is not the system's may have its library there
    "PYTHONHASHSEED": "0",  # two runs of the same code agree on the order of a set
    "PYTHONDONTWRITEBYTECODE": "1",
}
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nagent:x:{user}:{group}:agent:/root:/bin/bash\n",
    "group": "root:x:0:\nagent:x:{group}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
    "gitconfig": "[user]\n\tname = agent\n\temail = agent@sandbox\n[init]\n\tdefaultBranch = main\n",
}


@dataclass(frozen=True)
class Launched:
    """A running guest: our end of its conversation, and where it sends the listener of its proxy, if it has one."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    passage: socket.socket

    def listener(self) -> socket.socket:
        """Where the sandbox looks for its proxy: on its own loopback, and served by us. Once the guest has spoken."""
        self.passage.setblocking(False)
        _, fds, _, _ = socket.recv_fds(self.passage, 16, 1)
        return socket.socket(fileno=fds[0])


def launch(spec: SandboxSpec, join: Sequence[str] = ()) -> Launched:
    """Start it, in a process that went through the command `join`; `SandboxUnavailable` when a program is missing."""
    _check(spec)
    command = [*join, *_command()]
    with contextlib.ExitStack() as passed:
        connection, theirs = socket.socketpair()
        passage, inner = socket.socketpair()
        passed.enter_context(theirs)
        passed.enter_context(inner)
        config = {
            "limits": asdict(spec.limits),
            "workdir": spec.workdir,
            "environment": (VARIABLES if spec.network else {}) | dict(spec.environment),
            "proxy": (inner.fileno(), PORT) if spec.network else None,
            "processors": None if spec.limits.cpus is None else math.ceil(spec.limits.cpus),
        }
        mounts, fds = _mounts(spec.limits.disk, passed)
        process = subprocess.Popen(
            [*command, *mounts, *_python(), "-c", _START, json.dumps(config)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            pass_fds=[*fds, *([inner.fileno()] if spec.network else [])],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the owner, who may still want to finish an episode
        )
    return Launched(process, connection, passage)


def _check(spec: SandboxSpec) -> None:
    place = posixpath.normpath(spec.workdir)
    if place != spec.workdir or not place.startswith("/") or place == "/":
        raise ValueError(f"workdir must be an absolute path such as /workspace, not {spec.workdir!r}")
    for folder in _PROTECTED:
        if f"{place}/".startswith(f"{folder}/"):
            raise ValueError(f"workdir {spec.workdir} lies in {folder}, which is read-only in a bubblewrap sandbox")


@functools.cache
def _command() -> list[str]:
    bwrap = _program("bwrap", "bubblewrap")
    offered = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=10).stdout
    if missing := [flag for flag in _REQUIRED if flag not in offered]:
        raise SandboxUnavailable(
            f"{bwrap} lacks {', '.join(missing)}: install bubblewrap 0.8 or newer (Debian 12, Ubuntu 24.04)"
        )
    as_nobody = [_program("setpriv", "util-linux"), "--reuid", str(_NOBODY), "--regid", str(_NOBODY), "--clear-groups"]
    isolation = ["--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    isolation += ["--cap-drop", "ALL", "--disable-userns", "--hostname", "sandbox"]
    return [*(as_nobody if os.geteuid() == 0 else []), bwrap, *isolation]


def _mounts(disk: int, fds: contextlib.ExitStack) -> tuple[list[str], list[int]]:
    """bubblewrap's arguments, and the descriptors that they name."""
    passed: list[int] = []

    def file(content: int, path: str, mode: str = "0444") -> list[str]:
        passed.append(content)
        return ["--perms", mode, "--file", str(content), path]

    mounts = ["--size", str(disk), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.exists():
            mounts += ["--ro-bind", str(folder), str(folder)]  # not a link, which could be replaced
    mounts += ["--size", str(2**20), "--tmpfs", "/etc", "--size", str(16 * 2**20), "--tmpfs", _INSIDE]
    for path in (path for name in _SYSTEM_FILES for path in Path("/etc").glob(name)):
        mounts += ["--ro-bind-try", str(path), str(path)]
    user, group = (_NOBODY, _NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for name, text in _ETC.items():
        mounts += file(_memory(text.format(user=user, group=group).encode(), fds), f"/etc/{name}")
    for source in sorted(_GUEST.glob("*.py")):
        mounts += file(_opened(source, fds), f"{_INSIDE}/guest/{source.name}")
    mounts += file(_opened(Path(_program("bash", "bash")), fds), f"{_INSIDE}/bash", mode="0111")
    if prefix := _python_outside_usr():
        mounts += ["--ro-bind", prefix, _PYTHON_INSIDE]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--size", str(disk), "--tmpfs", "/dev/shm"]
    if filtering := seccomp.program():
        passed.append(_memory(filtering, fds))
        mounts += ["--seccomp", str(passed[-1])]
    for ours in ("/dev", "/etc", _INSIDE):
        mounts += ["--remount-ro", ours]
    return [*mounts, "--chdir", "/", "--"], passed


def _memory(content: bytes, fds: contextlib.ExitStack) -> int:
    fd = os.memfd_create("file")
    fds.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _opened(path: Path, fds: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY)
    fds.callback(os.close, fd)
    return fd


def _python() -> list[str]:
    """The system's Python, else the running one. No site: what is importable must not depend on the host."""
    prefix = _PYTHON_INSIDE if _python_outside_usr() else sys.base_prefix
    running = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return [_SYSTEM_PYTHON if Path(_SYSTEM_PYTHON).exists() else running, "-s", "-S"]


def _python_outside_usr() -> str | None:
    prefix = Path(sys.base_prefix).resolve()
    if Path(_SYSTEM_PYTHON).exists() or prefix.is_relative_to("/usr"):
        return None
    if os.geteuid() == 0:
        closed = [p for p in (prefix, *prefix.parents) if not p.stat().st_mode & stat.S_IXOTH]
        if closed:
            raise SandboxUnavailable(
                f"sandboxes of root run as nobody, who cannot enter {closed[-1]}, where this Python ({prefix}) lives. "
                "Install the system's Python (apt install python3) or one outside that folder."
            )
    return str(prefix)


def _program(name: str, package: str) -> str:
    beside = str(Path(sys.executable).parent)  # where an installation without root has it
    found = shutil.which(name) or shutil.which(name, path=beside)
    if not found:
        raise SandboxUnavailable(f"{name} is missing, sandboxes need it: apt install {package} (dnf, apk: same name)")
    return found


def explain(complaint: str) -> str:
    """What to do about bubblewrap's complaint."""
    lowered = complaint.lower()
    if "mount proc" in lowered:
        fix = "this container masks /proc: run it with --security-opt systempaths=unconfined (or --privileged)"
    elif "max_" in lowered:
        fix = "too many namespaces, or too deep: sysctl -w user.max_user_namespaces=10000, or leave the outer sandbox"
    elif any(text in lowered for text in ("namespace", "uid map", "rtm_newaddr", "clone", "pivot_root", "mount")):
        fix = _namespace_fix()
    elif lowered.startswith("setpriv"):
        fix = f"this root cannot become uid {_NOBODY}: run as an ordinary user, or in a container that maps that uid"
    else:
        fix = "run the same command by hand to see more"
    return f"bubblewrap cannot start a sandbox: {complaint.strip() or 'it ended without a word'}. Fix: {fix}."


def _namespace_fix() -> str:
    """User namespaces are off; say by which of the usual switches."""
    for name, allowed, advice in (
        ("kernel/unprivileged_userns_clone", lambda v: v != 0, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", lambda v: v > 0, "sysctl -w user.max_user_namespaces=10000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            lambda v: v == 0,
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for bwrap with userns",
        ),
    ):
        setting = Path("/proc/sys") / name
        if setting.exists() and not allowed(int(setting.read_text())):
            return f"user namespaces are switched off here: {advice}"
    return (
        "user namespaces are blocked; in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )
