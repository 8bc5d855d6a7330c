"""Level 4 of `repair`: ordinary functions, three of them in two files, one with a bug as people make them.

Invariant: as on the levels below, what a function should give never enters a sandbox: wanted values are computed here,
by our own functions (repair_functions.py). A fifth of those is held out: in training they are in no file, so neither
their code nor a bug of theirs was ever seen.
"""

import functools
import hashlib
import inspect
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import repair_functions as library
from .errors import InfrastructureError
from .repair import SANDBOXES, RepairProject
from .sandboxes import Outcome, SandboxPool
from .tasks.mutate import apply, mutations
from .tool_env import Grade, Message
from .tools import tool

SHOWN = 3  # cases of each function that run_tests knows; the others decide
PER_EPISODE = 3
TURNS = 16
SECONDS = 1.0  # for all cases of a function, which take microseconds
_FILES = ("a.py", "a.py", "b.py")


@dataclass(frozen=True)
class Exercise:
    """A function as it should be, in the file where it stands."""

    name: str
    file: str

    @property
    def source(self) -> str:
        return source(self.name)

    def wanted(self) -> list[Any]:
        """One value per case, as JSON gives it back."""
        function = getattr(library, self.name)
        return [json.loads(json.dumps(function(*case))) for case in json.loads(json.dumps(library.CASES[self.name]))]


@functools.cache
def source(name: str) -> str:
    return inspect.getsource(getattr(library, name))


@functools.cache
def names(split: str) -> list[str]:
    """The functions of a split: by a hash of their names, a fifth is held out."""
    ordered = sorted(library.CASES, key=lambda name: hashlib.sha256(name.encode()).digest())
    fifth = len(ordered) // 5
    return sorted(ordered[:fifth] if split == "held_out" else ordered[fifth:])


@functools.cache
def variants(name: str) -> list[str]:
    """The function with one line of it changed, in every way known to `mutate`."""
    right = source(name)
    changed = [apply(right, [mutation.edit]) for mutation in mutations(right)]
    return [each for each in dict.fromkeys(changed) if len(each.splitlines()) == len(right.splitlines())]


class RepairLibrary(RepairProject):
    """The tools of level 3."""

    def __init__(self, level: int, split: str):
        super().__init__(level, split)
        self.max_turns = TURNS
        self.exercises: list[Exercise] = []

    async def setup(self, seed: int, options: dict[str, Any]) -> str:  # type: ignore[override]
        rng = random.Random(f"{self.split} {self.level} {seed}")
        chosen = rng.sample(names(self.split), PER_EPISODE)
        self.exercises = [Exercise(name, file) for name, file in zip(chosen, _FILES)]
        bug = rng.choice(self.exercises)
        for broken in rng.sample(variants(bug.name), len(variants(bug.name))):
            texts = {each.name: broken if each == bug else each.source for each in self.exercises}
            self.files = {
                file: "\n\n".join(texts[each.name] for each in self.exercises if each.file == file)
                for file in dict.fromkeys(_FILES)
            }
            if any(not right for right, _ in (await self._compared(bug))[:SHOWN]):
                return self._opening()
        raise InfrastructureError(f"no change of {bug.name} is noticed by its first {SHOWN} cases")

    @tool
    async def run_tests(self) -> str:
        """Run the examples; shows those of the functions that fail."""
        report = []
        for each in self.exercises:
            compared = zip(library.CASES[each.name][:SHOWN], await self._compared(each))
            report += [_row(each.name, case, *found) for case, found in compared if not found[0]]
        return "\n".join(report) or "passed"

    async def grade(self) -> Grade:
        right = [all(each for each, _ in await self._compared(exercise)) for exercise in self.exercises]
        return Grade(float(all(right)), {"functions": sum(right) / len(right)})

    def expert(self, rng: random.Random) -> Any:
        return LibraryExpert(self, rng)

    async def _compared(self, exercise: Exercise) -> list[tuple[bool, str]]:
        """For each case whether it is right, and what it gave and should."""
        arguments = json.loads(json.dumps(library.CASES[exercise.name]))
        pool = SandboxPool.shared(size=SANDBOXES)
        outcomes = await pool.run_python(self.files[exercise.file], exercise.name, arguments, SECONDS)
        return [_compare(outcome, wanted) for outcome, wanted in zip(outcomes, exercise.wanted(), strict=True)]


def _compare(outcome: Outcome, wanted: Any) -> tuple[bool, str]:
    """By their JSON, which tells 1 from True; text is bounded, because a model reads it."""
    given = outcome.error or json.dumps(outcome.value, sort_keys=True)
    right = outcome.error is None and given == json.dumps(wanted, sort_keys=True)
    return right, f"is {given[:200]}, want {json.dumps(wanted)}"


def _row(name: str, case: Sequence[Any], right: bool, found: str) -> str:
    return f"{name}({', '.join(map(json.dumps, case))}) {found}"


class LibraryExpert:
    """A demonstrator that tests, opens the file of what fails, and repairs the right line `skill` of the time; else it
    changes a line of that function as `mutate` would."""

    skill = 0.3
    persists = 0.85

    def __init__(self, env: RepairLibrary, rng: random.Random):
        self._env, self._rng = env, rng
        self._failing: Exercise | None = None

    def __call__(self, messages: Sequence[Message]) -> str:
        last = messages[-1]
        answer = str(last["content"])
        if last["role"] == "user" or answer == "ok" or answer.startswith("Error"):
            return call("run_tests")
        if answer == "passed" or self._rng.random() > self.persists:
            return call("submit")
        if last.get("name") == "run_tests":
            self._failing = next(each for each in self._env.exercises if answer.startswith(each.name + "("))
            return call("read_file", file=self._failing.file)
        return self._repair(self._failing or self._env.exercises[0])

    def _repair(self, exercise: Exercise) -> str:
        """The function's lines as they are now, beside those of what it should become."""
        lines = self._env.files[exercise.file].splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"def {exercise.name}("))
        goal = exercise.source
        if self._rng.random() >= self.skill:
            goal = self._rng.choice(variants(exercise.name))
        pairs = zip(lines[start:], goal.splitlines())
        changed = [(start + i, wanted) for i, (line, wanted) in enumerate(pairs, 1) if line != wanted]
        if not changed:
            return call("run_tests")
        line, wanted = self._rng.choice(changed)
        return call("edit", file=exercise.file, line=line, text=wanted.strip())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
