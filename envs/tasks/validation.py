"""What is found out about a task before anybody trains on it.

Invariant: a validation says something about every task it looks at, and about what could not be read as one; it changes
nothing. Whatever has an async generator `validate(limit: int | None)` that yields these can be validated.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding, e.g. `Check("gsm8k/17", "reference fails", "it scores 0")`; without a problem, the task is sound."""

    task: str
    problem: str | None = None
    """In a few words, the same for all tasks that suffer from it: "malformed", "reference fails", "flaky"."""
    detail: str = ""
