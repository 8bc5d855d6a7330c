"""The sandbox's tie to its owner, and what a user reads when sandboxes cannot start. Owners here are processes."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path
from typing import Any

import argosy
import pytest
from argosy.envs.sandboxes import cgroup

PACKAGES = sysconfig.get_path("purelib")
OWNER = """
import asyncio, logging, os, site, sys
site.addsitedir(os.environ["PACKAGES"])
from argosy.envs import Limits, Sandbox, SandboxSpec, SandboxUnavailable

async def main():
    try:
        sandbox = await Sandbox.open(SandboxSpec(network=("listed",), limits=Limits(cpus=1, memory=100 * 2**20)))
    except SandboxUnavailable as error:
        return print("UNAVAILABLE", error)
    print((await sandbox.exec("id -u")).output.strip(), flush=True)
    print(await sandbox.run_python("def f(x): return x + 1", "f", [[1]]), flush=True)
    if len(sys.argv) > 1:
        await sandbox.exec(f"setsid sleep {sys.argv[1]} & sleep {sys.argv[1]} & echo")
        print("ready", flush=True)
        await sandbox.exec(f"sleep {sys.argv[1]}", timeout=999)
    print((await sandbox.exec("cd /tmp; echo kept > /workspace/x; sleep 9", 0.5)).reason)
    tar = await sandbox.snapshot()
    await sandbox.reset()
    await sandbox.restore(tar)
    print((await sandbox.exec("cat x; curl -s other | grep -c list")).output, end="")
    print((await sandbox.exec("x=$(head -c 150M /dev/zero | tr '\\\\0' x)")).reason)
    await sandbox.close()

logging.disable()
asyncio.run(main())
"""


def owner(prefix: list[str], *arguments: str, python: str = sys.executable, path: str = os.environ["PATH"]) -> Any:
    environment = {"PATH": path, "PACKAGES": PACKAGES, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*prefix, python, "-c", OWNER, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_kill_9_of_the_owner_leaves_no_process(processes_with: Any, eventually: Any) -> None:
    mark = f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"
    process = owner([], mark)
    for line in process.stdout:
        if line == "ready\n":
            break
    eventually(lambda: len(processes_with(f"sleep {mark}")) >= 3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    eventually(lambda: not processes_with(mark))


def test_what_a_killed_owner_left_in_control_groups_goes_with_the_next(processes_with: Any, eventually: Any) -> None:
    if not cgroup._parents():
        pytest.skip("no control groups may be made here")
    folders = set(cgroup._parents().values())
    groups = lambda pid: [g for folder in folders for g in folder.glob(f"argosy-*.{pid}.*")]  # noqa: E731
    mark = f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"
    process = owner([], mark)
    next(line for line in process.stdout if line == "ready\n")
    before = groups(process.pid)
    process.kill()
    process.wait(10)
    eventually(lambda: not processes_with(mark))
    second = owner([])
    assert second.wait(60) == 0
    assert before and groups(process.pid) == [] and groups(second.pid) == []


def readable_by_nobody(path: str) -> bool:
    resolved = Path(path).resolve()
    return resolved.stat().st_mode & 0o4 != 0 and all(folder.stat().st_mode & 0o1 for folder in resolved.parents)


def test_an_ordinary_user_can_run_it_too() -> None:
    if os.geteuid() != 0:
        pytest.skip("all other tests ran as an ordinary user")
    version = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    python = next((p for p in (sys.executable, version) if Path(p).exists() and readable_by_nobody(p)), None)
    if python is None or not all(map(readable_by_nobody, (PACKAGES, argosy.__file__))):
        pytest.skip("nobody may read neither this Python nor one of the system, or not the packages")
    process = owner(["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"], python=python)
    said = process.communicate(timeout=60)[0].splitlines()
    assert said == ["65534", "[Outcome(value=2, error=None)]", "timeout", "kept", "1", "oom"]


def test_without_bubblewrap_the_message_says_what_to_install(tmp_path: Path) -> None:
    output = owner([], path=str(tmp_path)).communicate(timeout=60)[0]
    assert output == "UNAVAILABLE bwrap is missing, sandboxes need it: apt install bubblewrap (dnf, apk: same name)\n"


def test_an_old_bubblewrap_is_named(tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho --unshare-all --as-pid-1 --size --perms --remount-ro\n")
    bwrap.chmod(0o755)
    output = owner([], path=str(tmp_path)).communicate(timeout=60)[0]
    assert (
        output
        == f"UNAVAILABLE {bwrap} lacks --disable-userns: install bubblewrap 0.8 or newer (Debian 12, Ubuntu 24.04)\n"
    )


def test_without_user_namespaces_the_message_names_the_fix() -> None:
    bwrap = shutil.which("bwrap")
    assert bwrap
    forbidding = [bwrap, "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--die-with-parent"]
    output = owner([*forbidding, "--uid", "1000"]).communicate(timeout=60)[0]
    assert output.startswith("UNAVAILABLE bubblewrap cannot start a sandbox: bwrap: ")
    assert "Fix: too many namespaces, or too deep: sysctl -w user.max_user_namespaces=10000" in output
