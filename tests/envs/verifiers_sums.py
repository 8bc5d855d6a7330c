"""A verifiers taskset of one turn; its config can make it flaky. Loaded by verifiers, not by tests."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

calls = itertools.count()


class Data(vf.TaskData):
    answer: int
    flaky: bool = False


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.flaky:
            return float(next(calls) % 2)
        return float(trace.last_reply == str(self.data.answer))


class Config(vf.TasksetConfig):
    count: int = 10
    flaky: int = -1
    """The task that is."""


class Sums(vf.Taskset[Task, Config]):
    def load(self) -> Iterator[Task]:
        print("this must not disturb the answers")
        for i in range(self.config.count):
            data = Data(prompt=f"{i}+{i}?", system_prompt="Add.", answer=2 * i, flaky=i == self.config.flaky)
            yield Task(data, self.config.task)


__all__ = ["Sums"]
