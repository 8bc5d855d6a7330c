"""Containers as the engine sees them: how they are made, whose they are, and their end.

Invariant: every container of ours carries its owner, run and expiry as labels from the moment it exists, so that
whoever finds it can tell whether anybody still needs it.
"""

import io
import socket
import tarfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SandboxUnavailable
from .docker_engine import engine
from .network import listen_inside
from .owners import Owner, run_name
from .spec import SandboxSpec

_LABEL = "argosy.sandbox"
_LIFETIME = 24 * 3600.0  # of a container: longer than any episode, and for one whose owner nobody here can see
_OWN_PROCESSES = 6  # of Docker's init, the sleeper, and those of `docker_shell`
_KEEPERS = ("65533:65533", "65532:65532")  # run the first process: a user that the commands are not


@dataclass(frozen=True)
class Container:
    """One that is ours, or was."""

    id: str
    name: str
    image: str
    run: str
    owner: Owner
    expires: float
    running: bool
    created: float

    @property
    def abandoned(self) -> bool:
        return self.owner.gone or time.time() > self.expires


def create(image: str, spec: SandboxSpec, user: str) -> tuple[str, float]:
    """A container that is not started, and when its time is up."""
    api, limits = engine(), spec.limits
    expires = time.time() + _LIFETIME
    owner = Owner.here()
    labels = {
        _LABEL: "1",
        f"{_LABEL}.run": run_name(),
        f"{_LABEL}.owner": str(owner),
        f"{_LABEL}.expires": f"{expires:.0f}",
    }
    scratch = dict.fromkeys(("/tmp", "/var/tmp"), f"rw,nosuid,nodev,exec,mode=1777,size={limits.disk}")
    name, _, group = user.partition(":")
    own = f"mode=755,uid={name},gid={group or name}" if name.isdigit() else "mode=1777"
    scratch[spec.workdir] = f"rw,nosuid,nodev,exec,{own},size={limits.disk}"
    storage = dict(api.info().get("DriverStatus") or ()).get("Backing Filesystem")
    host = api.create_host_config(
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        network_mode="none",
        mem_limit=limits.memory,
        memswap_limit=limits.memory,
        pids_limit=limits.processes + _OWN_PROCESSES,
        nano_cpus=int(limits.cpus * 1e9) if limits.cpus else None,
        shm_size=limits.disk,
        ulimits=[
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": limits.file_size, "Hard": limits.file_size},
        ],
        oom_score_adj=1000,  # when the machine runs out of memory, this goes before the trainer
        init=True,
        ipc_mode="private",
        read_only=spec.read_only,
        tmpfs=scratch if spec.read_only else None,
        storage_opt={"size": str(limits.disk)} if storage == "xfs" and not spec.read_only else None,
        log_config={"Type": "none"},
    )
    made: str = api.create_container(
        image,
        entrypoint=["sleep"],
        command=["2147483647"],
        user=next(keeper for keeper in _KEEPERS if keeper.split(":")[0] != user.split(":")[0]),
        labels=labels,
        host_config=host,
        working_dir="/",
        name=f"argosy-{owner.pid}-{uuid.uuid4().hex[:12]}",
    )["Id"]
    try:
        if not spec.read_only:
            _own_workdir(made, spec.workdir, user)
    except BaseException:
        remove(made)
        raise
    return made, expires


def _own_workdir(container: str, workdir: str, user: str) -> None:
    """Nobody in the container has the power to give the user a folder, so we do, where the image has none."""
    from docker.errors import NotFound

    api = engine()
    if user.split(":")[0] in ("0", "root"):
        return
    try:
        api.get_archive(container, workdir)[0].close()
        return
    except NotFound:
        pass
    folder = tarfile.TarInfo(workdir.strip("/"))
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    folder.uid, folder.gid = _numbers(container, user)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(folder)
    api.put_archive(container, "/", stream.getvalue())


def _numbers(container: str, user: str) -> tuple[int, int]:
    name, _, group = user.partition(":")
    if name.isdigit():
        return int(name), int(group) if group.isdigit() else int(name)
    stream = io.BytesIO(b"".join(engine().get_archive(container, "/etc/passwd")[0]))
    with tarfile.open(fileobj=stream) as tar:
        file = tar.extractfile("passwd")
        lines = file.read().decode(errors="replace").splitlines() if file else []
    for line in lines:
        fields = line.split(":")
        if fields[0] == name:
            return int(fields[2]), int(fields[3])
    raise SandboxUnavailable(f"the image has no user {name!r}: give `user` as numbers, such as 1000:1000")


def listen(container: str) -> socket.socket:
    """On the loopback of a container that runs, for the proxy that is its only way out."""
    process = engine().inspect_container(container)["State"]["Pid"]
    try:
        if container not in Path(f"/proc/{process}/cgroup").read_text():
            raise FileNotFoundError("its processes are not in sight")
        return listen_inside(process)
    except OSError as error:
        raise SandboxUnavailable(
            f"no host can be made reachable from container {container[:12]}: {error}. For an allow-list this process "
            "must be root on the engine's machine, and see its processes (in a container: --privileged --pid=host)"
        ) from error


def remove(container: str) -> None:
    """With its anonymous volumes; fine if it is gone, or somebody else is at it."""
    from docker.errors import APIError, NotFound

    try:
        engine().remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if "already in progress" not in str(error):
            raise


def find() -> list[Container]:
    """All containers of Argosy that the engine has, of whatever owner."""
    found = []
    for raw in engine().containers(all=True, filters={"label": _LABEL}):
        labels: dict[str, Any] = raw["Labels"]
        found.append(
            Container(
                id=raw["Id"],
                name=raw["Names"][0].lstrip("/"),
                image=raw["Image"],
                run=labels.get(f"{_LABEL}.run", ""),
                owner=Owner.parse(labels[f"{_LABEL}.owner"]),
                expires=float(labels[f"{_LABEL}.expires"]),
                running=raw["State"] == "running",
                created=float(raw["Created"]),
            )
        )
    return found
