"""Judging a finished stage where the agent cannot reach.

Invariant: what judges has never been in the agent's hands. A second, fresh sandbox ("the room") gets the task's files
and set-up, then the agent's changes to the declared artefacts and nothing else (`work.py`), then the hidden files over
whatever is in their place, and runs the command once, to its deadline, without network. Everything read out of either
sandbox is bounded and parsed as hostile. Only a task that says `shared` is judged where the agent worked; then its
processes are ended first, and what it left in the judge's places is removed.

A verifier that does not end in time, or leaves nothing readable, is `InvalidGrade`: no reward, and not 0.
"""

import asyncio
import posixpath
import shlex
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from ..errors import InvalidGrade
from ..sandboxes import Result, Sandbox, SandboxSpec
from ..tasks import RewardFile, Stage, Task
from ..tool_env import Grade
from .rewards import REWARDS
from .testimony import Witness, read_journal
from .verdicts import Evidence, judge
from .work import Work, absolute, contents, difference

_ROOMS = 2  # at once, per event loop: grading must not starve the episodes that are still being played
_SETUP = 600.0  # seconds for a task's set-up
_NOT_WORK = ("**/.git/**", ".git/**", "**/__pycache__/**")

_gates: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


async def grade(task: Task, stage: Stage, sandbox: Sandbox) -> Grade:
    """The grade of a stage as the agent left it in `sandbox`; `InvalidGrade` when there is none."""
    if stage.grading.shared:
        await sandbox.exec("kill -9 -1", fresh=True)
        return await _verify(task, stage, sandbox, Work({}, {}, ()))
    paths = [absolute(path, task.sandbox.workdir) for path in stage.grading.artefacts]
    try:
        made = await sandbox.snapshot(paths, _NOT_WORK)
    except OSError:  # more than a sandbox may hold
        return Grade(0.0, {"unreadable": 1.0})
    async with _room(stage.grading.sandbox or task.sandbox) as room:
        if stage.grading.sandbox is None:
            await prepare(task, stage, room)
        work = difference(made, await room.snapshot(paths, _NOT_WORK), stage, task.sandbox.workdir)
        await _remove(room, work.removed)
        return await _verify(task, stage, room, work)


async def prepare(task: Task, stage: Stage, sandbox: Sandbox) -> None:
    """What an agent finds when `stage` begins, without what it did in the stages before."""
    for each in task.stages:
        await begin(task, each, sandbox)
        if each == stage:
            return
    raise ValueError(f"task {task.id} has no such stage")


async def begin(task: Task, stage: Stage, sandbox: Sandbox) -> None:
    """Give the files of a stage and run its set-up, in a sandbox where the stages before have begun."""
    await place(stage.files, sandbox)
    for command in (task.setup if stage == task.stages[0] else "", stage.setup):
        if command:
            result = await sandbox.exec(command, timeout=_SETUP, fresh=True)
            if result.exit != 0:
                raise InvalidGrade(f"the set-up of {task.id} ended with {result.exit}: {result.output[-500:]}")


async def apply_solution(stage: Stage, sandbox: Sandbox) -> Result:
    """Do what the reference does; the result is that of its command, if it has one."""
    if stage.solution is None:
        raise ValueError("this stage has no reference solution")
    await place(stage.solution.files, sandbox)
    if not stage.solution.command:
        return Result(0, "")
    return await sandbox.exec(stage.solution.command, timeout=stage.grading.seconds, fresh=True)


async def steady(task: Task, stage: Stage, sandbox: Sandbox) -> tuple[Grade, Grade]:
    """Grade the same work twice: where the rewards differ, the grader is flaky."""
    return await grade(task, stage, sandbox), await grade(task, stage, sandbox)


async def place(files: Mapping[str, bytes], sandbox: Sandbox) -> None:
    """Put files in, over whatever is there: links are replaced, never followed."""
    if files:
        workdir = sandbox.spec.workdir
        await sandbox.restore(Work.of(files, workdir).archive(workdir))


async def _verify(task: Task, stage: Stage, room: Sandbox, work: Work) -> Grade:
    grading, workdir, witness = stage.grading, task.sandbox.workdir, Witness()
    hidden = {absolute(path, workdir): content for path, content in grading.files.items()}
    rewards = [grading.verdict.folder] if isinstance(grading.verdict, RewardFile) else []
    agent = [path for path in work.contents if path.endswith(".py")]
    ours = hidden | witness.files(agent, [path for path in hidden if path.endswith(".py")])
    if grading.shared:
        await _remove(room, [*hidden, *rewards])
    await room.restore((work | Work.of(ours, workdir)).archive(workdir))
    if grading.shared and await _linked(room, [*hidden, *rewards], witness.folder):
        return Grade(0.0, {"tampered": 1.0, "tampered/linked": 1.0})
    command = f"cd {shlex.quote(workdir)} && (\n{witness.watch(grading.command)}\n) > {witness.log} 2>&1"
    for folder in map(shlex.quote, rewards):
        command = f"rm -rf {folder}; mkdir -p {folder}; {command}"
    result = await room.exec(command, timeout=grading.seconds, fresh=grading.shared)
    if result.reason == "timeout":
        raise InvalidGrade(f"the verifier of {task.id} did not end within {grading.seconds:g} s")
    evidence = await _evidence(room, result.exit, witness, [posixpath.join(*rewards, name) for name in REWARDS])
    if grading.shared:  # the agent may go on with the next stage
        await _remove(room, [witness.folder, *(path for path in hidden if not path.startswith(workdir + "/"))])
    return judge(grading.verdict, evidence)


async def _evidence(room: Sandbox, exit: int, witness: Witness, rewards: list[str]) -> Evidence:
    """All at once, and only regular files: a link or a fifo in place of a report is no report."""
    try:
        tar = await room.snapshot([witness.log, witness.journal, *rewards])
    except OSError as error:
        raise InvalidGrade(f"what the verifier left cannot be read: {error}") from None
    found = contents(tar, room.spec.workdir)
    return Evidence(
        exit,
        found.get(witness.log, b"").decode(errors="replace"),
        read_journal(found.get(witness.journal, b"")),
        {posixpath.basename(path): found[path] for path in rewards if path in found},
    )


@asynccontextmanager
async def _room(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    """A sandbox that nobody had before, without network; gone afterwards."""
    gate = _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_ROOMS))
    async with gate:
        room = await Sandbox.open(replace(spec, network=()))
        try:
            yield room
        finally:
            await room.close()


async def _remove(room: Sandbox, paths: Iterable[str]) -> None:
    """A few at a time: a command may not be longer than the kernel allows an argument to be."""
    few: list[str] = []
    for path in [*map(shlex.quote, paths), ""]:
        if few and (not path or sum(map(len, few)) + len(path) > 60_000):
            await room.exec("rm -rf -- " + " ".join(few), fresh=True)
            few = []
        few.append(path)


async def _linked(room: Sandbox, secrets: Iterable[str], folder: str) -> bool:
    """The agent left a link that ends at what only the judge has; into a clean room such a link is never carried."""
    await room.exec(f"find . -xdev -type l -exec readlink -f {{}} ';' > {folder}/links 2> /dev/null", fresh=True)
    try:
        ends = (await room.read(f"{folder}/links")).decode(errors="replace").splitlines()
    except OSError as error:
        raise InvalidGrade(f"the links of the sandbox cannot be read: {error}") from None
    return any(end == secret or end.startswith(secret + "/") for end in ends for secret in secrets)
