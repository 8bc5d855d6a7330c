"""Sandboxes outlive nobody: owners here are real processes, and they are killed with -9."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
from argosy.envs import SandboxSpec
from argosy.envs.sandboxes import containers, reaper
from argosy.envs.sandboxes.owners import Owner

ARGOSY = str(Path(sys.executable).with_name("argosy"))
OWNER = """
import asyncio, sys
from argosy.envs import Limits, Sandbox, SandboxSpec

async def main():
    inside = await Sandbox.open(SandboxSpec(limits=Limits(cpus=1.0)))
    docker = await Sandbox.open(SandboxSpec("docker", sys.argv[1]))
    await docker.exec(f"setsid sleep {sys.argv[2]} &")
    print(docker._container, flush=True)
    await asyncio.gather(inside.exec("sleep 999", 999), docker.exec(f"sleep {sys.argv[2]}", 999))

asyncio.run(main())
"""
Start = Callable[[str], tuple[subprocess.Popen[str], str, str]]


@pytest.fixture
def start(docker_image: str) -> Iterator[Start]:
    """A process of a run that holds a sandbox of each kind: it, its container, and a text of its command lines."""
    started = []

    def begin(run: str) -> tuple[subprocess.Popen[str], str, str]:
        mark = f"{300 + uuid.uuid4().int % 10**9 / 1e9:.9f}"
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, docker_image, mark],
            env={**os.environ, "ARGOSY_RUN": run},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout
        container = process.stdout.readline().strip()
        assert container, "the owner could not start"
        return process, container, mark

    yield begin
    for process in started:
        process.kill()
        process.wait()
    reaper.reap()


def command_line(*arguments: str) -> list[dict[str, Any]]:
    command = [ARGOSY, "sandbox", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def of_run(run: str) -> list[reaper.Held]:
    return [one for one in reaper.held() if one.run == run]


def control_groups(pid: int) -> list[str]:
    found = subprocess.run(["find", "/sys/fs/cgroup", "-name", f"argosy-*.{pid}.*"], capture_output=True, text=True)
    return found.stdout.split()


def test_kill_9_of_every_owner_leaves_nothing_behind(start: Start, processes_with: Any, eventually: Any) -> None:
    ours, theirs = f"run-{uuid.uuid4()}", f"run-{uuid.uuid4()}"
    (first, container, mark), (second, sibling, kept) = start(ours), start(theirs)
    listed = [(one["backend"], one["owner"]) for one in command_line("ls") if one["run"] == ours]
    assert sorted(listed) == [("bubblewrap", first.pid), ("docker", first.pid)]

    first.kill()
    first.wait()
    eventually(lambda: not processes_with(mark))  # the warden saw its owner go; only the idle container is left
    [left] = of_run(ours)
    assert left.id == container and left.abandoned
    removed = [one.id for one in reaper.reap()]
    assert container in removed and sibling not in removed
    assert not of_run(ours) and not control_groups(first.pid)
    assert second.poll() is None and processes_with(kept), "a living run's are not touched"

    second.kill()
    second.wait()
    third, _, _ = start(ours)  # the next start of anybody's, without a word from us
    eventually(lambda: sibling not in [one.id for one in reaper.held()])

    assert len(command_line("reap", "--all-of", ours)) >= 2
    assert not of_run(ours)
    third.wait(30)  # its calls ended with an error, at once


def test_what_nobody_here_can_judge_stays_until_its_time_is_up(
    docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = docker.APIClient(base_url=os.environ["DOCKER_HOST"], version="auto")
    image, spec = api.inspect_image(docker_image)["Id"], SandboxSpec("docker", docker_image)
    here = Owner.here()
    made = {}
    for name, owner, lifetime in (
        ("mine", here, 60.0),
        ("elsewhere", replace(here, machine="other", pid=2**22 - 1), 60.0),
        ("another container's", replace(here, namespace=1, pid=2**22 - 1), 60.0),
        ("expired", replace(here, machine="other"), -1.0),
        ("before the last boot", replace(here, boot="0"), 60.0),
        ("of a process id that was given again", replace(here, started=here.started + 1), 60.0),
    ):
        monkeypatch.setattr(Owner, "here", classmethod(lambda cls, owner=owner: owner))
        monkeypatch.setattr(containers, "_LIFETIME", lifetime)
        made[name] = containers.create(image, spec, "0")[0]
    monkeypatch.undo()
    abandoned = {found.id for found in containers.find() if found.abandoned}
    try:
        assert {name for name, container in made.items() if container in abandoned} == {
            "expired",
            "before the last boot",
            "of a process id that was given again",
        }
    finally:
        for container in made.values():
            containers.remove(container)
            containers.remove(container)  # no matter how often


def test_owners_are_known_by_their_text() -> None:
    here = Owner.here()
    assert Owner.parse(str(here)) == here and not here.gone
    with pytest.raises(ValueError):
        Owner.parse("argosy")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    owner = replace(here, pid=process.pid, started=started)
    assert not owner.gone
    process.kill()
    deadline = time.monotonic() + 10
    while not owner.gone:  # while it is a zombie: nobody has waited for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
    assert owner.gone
