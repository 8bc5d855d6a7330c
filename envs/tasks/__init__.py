"""Coding tasks from the formats they come in."""

from .task import ExitStatus, Grading, NamedTests, RewardFile, Solution, Stage, Task, TestOutcomes, Verdict

__all__ = [
    "ExitStatus",
    "Grading",
    "NamedTests",
    "RewardFile",
    "Solution",
    "Stage",
    "Task",
    "TestOutcomes",
    "Verdict",
]
