"""Coding tasks, played: a shell and an editor in a sandbox, stage by stage, judged where the agent cannot reach.

Invariant: the sandbox belongs to one episode and holds nothing but what the task gives its agent. What the agent does
wrong, runs too long or breaks is graded; a sandbox that is gone, or a verifier without an answer, ends the episode at
once as an `InfrastructureError`. What a tool answers is bounded.

Sandboxes come warm from `SandboxPool.shared` and wait for one another; the grade comes from `grading.grade`, in a
sandbox of its own.
"""

import asyncio
import functools
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from .errors import SandboxGone, ToolError
from .grading import begin, grade
from .guard import Guard, Judge
from .sandboxes import Result, Sandbox, SandboxPool
from .sources.order import position
from .tasks import Stage
from .tasks.load import Backend, tasks_of
from .tasks.validation import Check, validate_tasks
from .tool_env import Grade, Message, ToolEnv
from .tools import Tool, ToolCall, tool

SHOWN = 16_000  # characters of one answer: a model's context holds dozens of them
LONGEST = 300.0  # seconds of one command
NO_TIME = "The time for this task is over; your work is judged as it is."


class CodeEnv(ToolEnv):
    """The environment `argosy/code`: each seed is one task of a source such as "harbor:PATH"."""

    system = (
        "You solve programming tasks in a sandbox. Look around with the tools, change the files, run what you need to "
        "check your work, then call submit."
    )

    def __init__(
        self,
        source: str,
        split: str = "all",
        backend: Backend | None = None,
        max_turns: int = 50,
        tools: Sequence[str] = ("bash", "read_file", "write_file", "edit", "submit"),
        guard: bool = True,
        judge: str | None = None,
        sandboxes: int = 64,
        **options: Any,
    ):
        """`backend` and `options` are those of `load_tasks`; `judge` is the URL of a model that the guard may ask."""
        loaded = tasks_of(source, split, backend, **options)
        if not loaded.tasks:
            raise ValueError(
                f"{source} has no task to play in split {split!r}. {' '.join(map(str, loaded.problems[:3]))}"
            )
        if unknown := set(tools) - self.tools.keys():
            raise ValueError(f"no tool {', '.join(sorted(unknown))}; there are {', '.join(self.tools)}")
        if "submit" not in tools:
            raise ValueError("tools must name submit, which is how an agent ends")
        self._loaded, self.tasks = loaded, loaded.tasks
        self.max_turns, self.sandboxes = max_turns, sandboxes
        self.tools = {name: _watched(found) for name, found in self.tools.items() if name in tools}
        self._guarded, self._judge_model = guard, Judge(judge) if judge else None
        self._sandbox: Sandbox | None = None

    async def setup(self, seed: int, options: dict[str, Any]) -> str:
        self.task = self.tasks[position(seed, len(self.tasks))]
        self.grades: list[Grade] = []
        self._command: asyncio.Future[Result] | None = None
        self.guard = Guard(judge=self._judge_model) if self._guarded else None
        self._pool = SandboxPool.shared(self.sandboxes, self.task.sandbox)
        self._sandbox = await self._pool.acquire()
        await begin(self.task, self.stage, self._sandbox)
        self._deadline = _now() + self.task.seconds
        return self._instruction()

    @property
    def stage(self) -> Stage:
        """The one being played, or the last."""
        return self.task.stages[min(len(self.grades), len(self.task.stages) - 1)]

    @property
    def sandbox(self) -> Sandbox:
        if self._sandbox is None or not self._sandbox.alive:
            raise SandboxGone("the episode's sandbox is gone")
        return self._sandbox

    @tool
    async def bash(self, command: str, timeout: float = 60.0) -> str:
        """Run a command in a shell that stays: its directory and variables carry over to the next command.

        Args:
            command: what to run
            timeout: seconds after which it is killed, at most 300
        """
        if not 0 < timeout <= LONGEST:
            raise ToolError(f"timeout must be more than 0 and at most {LONGEST:g} seconds")
        self._command = asyncio.ensure_future(self.sandbox.exec(command, timeout=min(timeout, max(1.0, self._left()))))
        # Who stops waiting for the answer, because the episode is out of time, wants the sandbox graded, not broken.
        return _shown(await asyncio.shield(self._command))

    @tool
    async def read_file(self, path: str, start: int = 1, end: int | None = None) -> str:
        """Show a text file, or the lines from start to end of it.

        Args:
            path: absolute, or relative to where you started
            start: first line, counting from 1
            end: last line; without it, the last of the file
        """
        lines = (await self._text(path)).splitlines(keepends=True)
        if start < 1 or (end is not None and end < start):
            raise ToolError(f"lines count from 1, and end is not before start: {start} to {end}")
        if start > max(1, len(lines)):
            raise ToolError(f"{path} has {len(lines)} lines")
        return _bounded("".join(lines[start - 1 : end]))

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """Write a file, over what may be there; folders are made.

        Args:
            path: absolute, or relative to where you started
            content: the whole new content
        """
        await self._write(path, content)
        return "ok"

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a piece of a file that occurs in it exactly once.

        Args:
            path: absolute, or relative to where you started
            old: the piece as it stands in the file, with enough around it to be the only one
            new: what to put in its place
        """
        text = await self._text(path)
        if not old:
            raise ToolError("old is empty; use write_file for a new file")
        if (count := text.count(old)) != 1:
            advice = "look at the file again, spaces count" if count == 0 else "add more of what stands around it"
            raise ToolError(f"old occurs {count} times in {path}, not once: {advice}")
        await self._write(path, text.replace(old, new))
        return "ok"

    @tool
    async def submit(self) -> str:
        """Hand in your work. It is judged, and if the task has a next part, you are told that."""
        if len(self.grades) + 1 < len(self.task.stages):
            await self._judge()
            if not self._over():
                await begin(self.task, self.stage, self.sandbox)
                return self._instruction()
        self.finish()
        return "submitted"

    async def grade(self) -> Grade:
        if not self._over():
            await self._judge()
        rewards = [found.reward for found in self.grades] + [0.0] * (len(self.task.stages) - len(self.grades))
        parts = {**self.grades[-1].parts, **(self.guard.parts() if self.guard else {})}
        if len(rewards) > 1:
            parts |= {f"stage_{number}": reward for number, reward in enumerate(rewards, 1)}
        return Grade(statistics.fmean(rewards) if self.task.combine == "mean" else rewards[-1], parts)

    async def close_episode(self) -> None:
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            if self._command is not None and not self._command.done():
                self._command.cancel()
                await asyncio.wait({self._command})
            if not any(other is not self.task and other.sandbox == self.task.sandbox for other in self.tasks):
                await sandbox.close()  # an image of this task's own: kept warm, each would leave one behind
            await self._pool.release(sandbox)

    def validate(self, limit: int | None = None) -> AsyncIterator[Check]:
        return validate_tasks(self._loaded, limit)

    def expert(self, rng: random.Random) -> Callable[[Sequence[Message]], str]:
        """Does what the reference solution does, one call a turn."""
        done: list[ToolCall] = []

        def answer(messages: Sequence[Message]) -> str:
            if not done:
                done.extend(_reference(self.stage))
            return str(done.pop(0))

        return answer

    def _instruction(self) -> str:
        count = len(self.task.stages)
        part = f"Part {len(self.grades) + 1} of {count}.\n\n" if count > 1 else ""
        return part + self.stage.instruction

    async def _judge(self) -> None:
        if self._command is not None:
            await asyncio.wait({self._command})  # it ends at its own deadline
        self.grades.append(await grade(self.task, self.stage, self.sandbox))

    def _over(self) -> bool:
        """Nothing is left to be judged: the stages are through, or the last was not good enough to go on."""
        if not self.grades:
            return False
        limits = (self.task.least, self.task.stages[len(self.grades) - 1].least)
        failed = any(least is not None and self.grades[-1].reward < least for least in limits)
        return failed or len(self.grades) == len(self.task.stages)

    def _left(self) -> float:
        return self._deadline - _now()

    async def allow(self, call: ToolCall) -> None:
        """Stands before every tool: `ToolError` for a call that cheats, or comes when the time is over."""
        if self._left() <= 0:
            self.finish()
            raise ToolError(NO_TIME)
        if self.guard is not None and (blocked := await self.guard.review(call, self.task)):
            raise ToolError(blocked.message)

    async def _text(self, path: str) -> str:
        try:
            return (await self.sandbox.read(path)).decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not a text file") from None
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror or error}") from None

    async def _write(self, path: str, content: str) -> None:
        try:
            await self.sandbox.write(path, content)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror or error}") from None


def _watched(found: Tool) -> Tool:
    @functools.wraps(found.function)
    async def function(env: CodeEnv, **arguments: Any) -> Any:
        await env.allow(ToolCall(found.name, arguments))
        return await found.function(env, **arguments)

    return replace(found, function=function)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _bounded(text: str) -> str:
    """Both ends of a long text, and how much is missing between them."""
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


def _shown(result: Result) -> str:
    """Output, and how it ended unless that was well."""
    text = _bounded(result.output)
    end = {
        "timeout": "killed: it took too long, and so did all that still ran",
        "oom": "killed: it took too much memory, and so did all that still ran",
        "killed": "killed by a signal",
        None: f"exit status {result.exit}" if result.exit else "",
    }[result.reason]
    if end:
        text += f"{'' if text.endswith(chr(10)) or not text else chr(10)}[{end}]"
    return text or "[no output]"


def _reference(stage: Stage) -> list[ToolCall]:
    """What the reference comes to as calls; not at the place that only a cheat would touch."""
    calls = []
    if stage.solution is not None:
        for path, data in stage.solution.files.items():
            calls.append(ToolCall("write_file", {"path": path, "content": data.decode(errors="replace")}))
        if stage.solution.command:
            calls.append(ToolCall("bash", {"command": stage.solution.command}))
    moved = [
        {name: text.replace("/solution/", "/tmp/reference/") for name, text in call.arguments.items()} for call in calls
    ]
    return [*(ToolCall(call.name, arguments) for call, arguments in zip(calls, moved)), ToolCall("submit", {})]
