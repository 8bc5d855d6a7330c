"""What is found out about a task before anybody trains on it.

Invariant: a validation says something about every task it looks at, and about what could not be read as one; it changes
nothing. Whatever has an async generator `validate(limit: int | None)` that yields these can be validated.

For coding tasks: the reference must pass, the untouched stub must fail, and so must a sandbox whose given files were
deleted; two gradings of the same work must agree; and the agent must not be able to read the reference or the hidden
files (leaks.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InfrastructureError, InvalidGrade
from ..sandboxes import Sandbox, SandboxPool

if TYPE_CHECKING:
    from .load import Loaded
    from .task import Task

AT_ONCE = 2


@dataclass(frozen=True)
class Check:
    """One finding, e.g. `Check("gsm8k/17", "reference fails", "it scores 0")`; without a problem, the task is sound."""

    task: str
    problem: str | None = None
    """In a few words, the same for all tasks that suffer from it: "malformed", "reference fails", "flaky"."""
    detail: str = ""


async def validate_tasks(loaded: "Loaded", limit: int | None = None) -> AsyncIterator[Check]:
    """Everything wrong with each of the first `limit` tasks, in their order; before them, what could not be loaded."""
    for problem in loaded.problems:
        told = f"{problem.field}: {problem.message}" if problem.field else problem.message
        yield Check(problem.where, "malformed", told)
    free = asyncio.Semaphore(AT_ONCE)

    async def examine(task: "Task") -> list[Check]:
        async with free:
            try:
                found = [Check(task.id, *problem) async for problem in _problems(task)]
            except InfrastructureError as error:
                found = [Check(task.id, "cannot run", str(error))]
            return found or [Check(task.id)]

    running = [asyncio.create_task(examine(task)) for task in loaded.tasks[:limit]]
    try:
        for examination in running:
            for check in await examination:
                yield check
    finally:
        for examination in running:
            examination.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _problems(task: "Task") -> AsyncIterator[tuple[str, str]]:
    from .leaks import leaks

    if any(stage.solution is None for stage in task.stages):
        yield "no reference", "nothing shows that it can be solved"
    elif problem := await _reference(task):
        yield problem
    async with _begun(task) as sandbox:
        found = await leaks(task, sandbox)
        if problem := await _worthless(task, "stub", sandbox):
            yield problem
    async with _begun(task) as sandbox:
        await sandbox.exec("find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +", timeout=120)
        if problem := await _worthless(task, "empty", sandbox):
            yield problem
    for leak in found:
        yield "leaks", leak


async def _reference(task: "Task") -> tuple[str, str] | None:
    """Play the reference through all stages, each graded twice."""
    from ..grading import apply_solution, begin, steady

    async with _begun(task) as sandbox:
        for number, stage in enumerate(task.stages, 1):
            where = f"stage {number}: " if len(task.stages) > 1 else ""
            if number > 1:
                await begin(task, stage, sandbox)
            result = await apply_solution(stage, sandbox)
            if result.exit:
                return "reference fails", f"{where}its command ends with {result.exit}: {result.output[-300:].strip()}"
            try:
                once, again = await steady(task, stage, sandbox)
            except InvalidGrade as error:
                return "reference fails", f"{where}{error}"
            if once.reward != again.reward:
                return "flaky", f"{where}the reference scores {once.reward:g}, then {again.reward:g}"
            if once.reward < 1.0:
                return "reference fails", f"{where}it scores {once.reward:g} {dict(once.parts)}"
    return None


async def _worthless(task: "Task", what: str, sandbox: Sandbox) -> tuple[str, str] | None:
    """Grade work that is worth nothing."""
    from ..grading import grade

    try:
        reward = (await grade(task, task.stages[0], sandbox)).reward
    except InvalidGrade as error:
        return f"{what} has no grade", str(error)
    return (f"{what} passes", f"it scores {reward:g} for nothing") if reward >= 1.0 else None


@asynccontextmanager
async def _begun(task: "Task") -> AsyncIterator[Sandbox]:
    """A sandbox as an agent finds it."""
    from ..grading import begin

    async with SandboxPool.shared(AT_ONCE, task.sandbox).sandbox() as sandbox:
        await begin(task, task.stages[0], sandbox)
        yield sandbox
