"""Level 5 of `repair`: a bug in a package of others, from a folder that `argosy tasks make` wrote.

Invariant: the agent reads and edits texts in this object. Its tests run in a sandbox that holds no hidden test, and the
grade comes from a clean one (`grading.grade`). The split is by function, as the folder's tasks have it.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from .errors import ToolError
from .grading import grade, place, prepare
from .repair import SANDBOXES
from .repair_library import call
from .sandboxes import Sandbox, SandboxPool
from .sources.order import position
from .tasks.factory import HOW
from .tasks.load import tasks_of
from .tool_env import Grade, Message, ToolEnv
from .tools import tool

SHOWN = 120  # lines of one answer of read_file
TEST_SECONDS = 60.0
TAIL = 2000  # characters of what the tests say


class RepairPackage(ToolEnv):
    """The tools of level 3, for files of a thousand lines."""

    system = "Repair the code."
    max_turns = 24

    def __init__(self, split: str, source: str):
        self.tasks = tasks_of(f"factory:{source}", split).tasks
        if not self.tasks:
            raise ValueError(f"{source} has no task in split {split!r}: make more with `argosy tasks make`")

    def setup(self, seed: int, options: dict[str, Any]) -> str:
        self.task = self.tasks[position(seed, len(self.tasks))]
        self.stage = self.task.stages[0]
        python = {name: data for name, data in self.stage.files.items() if name.endswith(".py")}
        self.files = {name: data.decode(errors="replace") for name, data in python.items()}
        self._given = dict(self.files)
        return self.stage.instruction.removesuffix(HOW).strip()

    @tool
    def read_file(self, file: str, start: int = 1) -> str:
        """Show up to 120 numbered lines of a file.

        Args:
            file: name of the file
            start: the first line to show, from 1
        """
        lines = self._read(file).splitlines()
        shown = [f"{number} {line}" for number, line in enumerate(lines, 1) if start <= number < start + SHOWN]
        if not shown:
            raise ToolError(f"{file} has {len(lines)} lines")
        left = len(lines) - (start + SHOWN - 1)
        return "\n".join([*shown, *([f"... {left} more lines"] if left > 0 else [])])

    @tool
    def edit(self, file: str, first: int, last: int, text: str) -> str:
        """Replace the lines from first to last of a file.

        Args:
            file: name of the file
            first: number of the first line to go, from 1
            last: number of the last line to go
            text: the new lines, with their indentation
        """
        lines = self._read(file).splitlines()
        if not 1 <= first <= last <= len(lines):
            raise ToolError(f"{file} has lines 1 to {len(lines)}, and last is not before first")
        lines[first - 1 : last] = text.splitlines()
        self.files[file] = "\n".join(lines) + "\n"
        return "ok"

    @tool
    async def run_tests(self) -> str:
        """Run the package's tests, but for the hidden ones."""
        async with self._workplace() as sandbox:
            result = await sandbox.exec("sh .argosy/test.sh -x --tb=short", timeout=TEST_SECONDS, fresh=True)
        if result.reason is not None:
            return f"the tests ended by {result.reason} ({TEST_SECONDS:g} s)"
        return "passed" if result.exit == 0 else result.output[-TAIL:]

    @tool
    def submit(self) -> str:
        """Hand in the code as it is now."""
        self.finish()
        return "submitted"

    async def grade(self) -> Grade:
        async with self._workplace() as sandbox:
            return await grade(self.task, self.stage, sandbox)

    def expert(self, rng: random.Random) -> Any:
        return PackageExpert(self, rng)

    def _read(self, file: str) -> str:
        if file not in self.files:
            raise ToolError(f"no file {file!r}; there are {', '.join(self.files)}")
        return self.files[file]

    @asynccontextmanager
    async def _workplace(self) -> AsyncIterator[Sandbox]:
        """A sandbox with the task's files as the agent has made them."""
        changed = {name: text.encode() for name, text in self.files.items() if text != self._given[name]}
        async with SandboxPool.shared(SANDBOXES, self.task.sandbox).sandbox() as sandbox:
            await prepare(self.task, self.stage, sandbox)
            await place(changed, sandbox)
            yield sandbox


class PackageExpert:
    """Looks where the bug is, and puts back what was there `skill` of the time; else it hands in what it found."""

    skill = 0.5

    def __init__(self, env: RepairPackage, rng: random.Random):
        self._env, self._rng = env, rng

    def __call__(self, messages: Sequence[Message]) -> str:
        found = self._difference()
        if found is None:
            return call("submit")
        file, first, last, text = found
        if messages[-1].get("name") != "read_file":
            return call("read_file", file=file, start=max(1, first - SHOWN // 2))
        if self._rng.random() < self.skill:
            return call("edit", file=file, first=first, last=last, text=text)
        return call("submit")

    def _difference(self) -> tuple[str, int, int, str] | None:
        """The first file that is not as it should be, and the lines that would make it so; at least one goes."""
        assert self._env.stage.solution is not None
        for file, data in self._env.stage.solution.files.items():
            now, right = self._env.files[file].splitlines(), data.decode().splitlines()
            if now == right:
                continue
            same = next((i for i, (a, b) in enumerate(zip(now, right)) if a != b), min(len(now), len(right)) - 1)
            tail = 0
            while tail < min(len(now), len(right)) - same - 1 and now[-1 - tail] == right[-1 - tail]:
                tail += 1
            return file, same + 1, len(now) - tail, "\n".join(right[same : len(right) - tail])
        return None
