"""A verifiers taskset whose reward needs a machine. Loaded by verifiers, not by tests."""

from typing import Any

import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime: Any) -> float:
        return 1.0


class Needy(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> list[Task]:
        return [Task(vf.TaskData(prompt="Run something."), self.config.task)]


__all__ = ["Needy"]
