"""A verifiers taskset with a tool, a state, a stop and endless tasks. Loaded by verifiers, not by tests."""

import os
import time
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class State(vf.State):
    notes: list[str] = []


class Notes(vf.Toolset[vf.ToolsetConfig, State]):
    TOOL_PREFIX = "notes"

    async def setup_task(self, task: vf.TaskData) -> None:
        self.owner = task.prompt

    @vf.tool
    async def add(self, text: str, times: int = 1) -> str:
        """Write a note."""
        if text == "bad":
            raise ValueError("not that")
        if text == "die":
            os._exit(5)
        if text == "hang":
            time.sleep(60)
        self.state.notes += [text] * times
        return f"{len(self.state.notes)} notes for {self.owner}"


class Task(vf.Task[vf.TaskData, State]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Notes]:
        return [Notes(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.notes.append("first")

    @vf.stop
    async def full(self, trace: vf.Trace) -> bool:
        return len(trace.state.notes) > 5

    @vf.reward(weight=2.0)
    async def count(self, trace: vf.Trace) -> float:
        return len(trace.state.notes)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return sum(message.role == "tool" for message in trace.messages)


class NoteTasks(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Task]:
        i = 0
        while True:
            yield Task(vf.TaskData(prompt=f"task {i}", name=f"note {i}"), self.config.task)
            i += 1


__all__ = ["NoteTasks"]
