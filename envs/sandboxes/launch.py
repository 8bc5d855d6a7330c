"""Starting the guest program under bubblewrap, and explaining why that failed.

Invariant: the guest sees /usr read-only, its own /proc and /dev, three empty scratch file systems of bounded size, and
nothing else of the host; no network, no capabilities, no user namespaces, and never host root (root goes through
setpriv, because a user namespace alone maps to the one who made it). Its life hangs on the owner twice: the kernel
kills bubblewrap with its parent, and the guest leaves when its socket closes.
"""

import functools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import SandboxUnavailable

_NOBODY = "65534"
_SYSTEM_PYTHON = "/usr/bin/python3"
_GUEST = Path(__file__).with_name("guest.py")
_GUEST_INSIDE = "/run/guest.py"
_PYTHON_INSIDE = "/run/python"
_REQUIRED = ("--as-pid-1", "--disable-userns", "--size", "--remount-ro")
_SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{_PYTHON_INSIDE}/lib",  # a Python that is not the system's may have its library there
    "PYTHONHASHSEED": "0",  # two runs of the same code agree on the order of a set
    "PYTHONDONTWRITEBYTECODE": "1",
}


def launch(limits: Mapping[str, int]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The running process and our end of its socket; `SandboxUnavailable` when a program is missing."""
    ours, theirs = socket.socketpair()
    guest = os.open(_GUEST, os.O_RDONLY)
    try:
        process = subprocess.Popen(
            [*_command(), *_mounts(limits["disk"], guest), *_python(), _GUEST_INSIDE, json.dumps(limits)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            pass_fds=[guest],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the owner, who may still want to finish an episode
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(guest)
    return process, ours


@functools.cache
def _command() -> list[str]:
    bwrap = _program("bwrap", "bubblewrap")
    offered = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=10).stdout
    if missing := [flag for flag in _REQUIRED if flag not in offered]:
        raise SandboxUnavailable(
            f"{bwrap} lacks {', '.join(missing)}: install bubblewrap 0.8 or newer (Debian 12, Ubuntu 24.04)"
        )
    as_nobody = [_program("setpriv", "util-linux"), "--reuid", _NOBODY, "--regid", _NOBODY, "--clear-groups"]
    isolation = ["--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"]
    return [*(as_nobody if os.geteuid() == 0 else []), bwrap, *isolation, "--cap-drop", "ALL", "--disable-userns"]


def _mounts(disk: int, guest: int) -> list[str]:
    mounts = ["--ro-bind", "/usr", "/usr"]
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            mounts += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.exists():
            mounts += ["--ro-bind", str(folder), str(folder)]
    for file in ("/etc/alternatives", "/etc/ld.so.cache"):
        mounts += ["--ro-bind-try", file, file]
    if prefix := _python_outside_usr():
        mounts += ["--ro-bind", prefix, _PYTHON_INSIDE]
    mounts += ["--ro-bind-data", str(guest), _GUEST_INSIDE, "--proc", "/proc", "--dev", "/dev"]
    for scratch in ("/workspace", "/tmp", "/dev/shm"):
        mounts += ["--size", str(disk), "--tmpfs", scratch]
    # Bubblewrap's own root and /dev are unbounded file systems in memory.
    return [*mounts, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/workspace", "--"]


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
