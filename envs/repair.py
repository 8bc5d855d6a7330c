"""Repair: small Python functions with a bug; failing examples tell what each should do, hidden tests judge.

Invariant: what a function should compute never enters a sandbox, nor the agent's workspace: sandboxes get code and
arguments and give values back, and the comparison happens here. A fifth of all correct functions (`split="held_out"`,
chosen by a hash) never occurs in training: not as what is wanted, not as a bug, not in a demonstration.

Levels: 1 is one function in one file with a wrong operator or constant; 2 is two functions in one file, each with a
bug; 3 is the same in two files that have to be read first; 4 (repair_library.py) is ordinary functions with ordinary
bugs; 5 (repair_package.py) is a package of others, from a folder made by the task factory.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ToolError
from .sandboxes import Outcome, SandboxPool
from .tool_env import Grade, Message, ToolEnv
from .tools import tool

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, c: x + c,
    "-": lambda x, c: x - c,
    "*": lambda x, c: x * c,
}
CONSTANTS = range(2, 100)
EXAMPLES = (0, 1)  # what run_tests shows: f(0) tells the operator, f(1) the constant
HIDDEN = (2, 3, 5, 17, -4)
TURNS_PER_FUNCTION = 8  # three repairs, each looked at
SANDBOXES = 2  # a run takes milliseconds, so a few serve many episodes


@dataclass(frozen=True)
class Formula:
    """`x <operator> <constant>`: what a function computes, or should."""

    operator: str
    constant: int

    def __call__(self, x: int) -> int:
        return OPERATORS[self.operator](x, self.constant)

    def __str__(self) -> str:
        return f"return x {self.operator} {self.constant}"

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(str(self).encode()).digest()[0] % 5 == 0


@dataclass(frozen=True)
class Function:
    """One function of a task: where it stands, what it should compute and what it computes now."""

    name: str
    file: str
    wanted: Formula
    broken: Formula

    @property
    def source(self) -> str:
        return f"def {self.name}(x):\n    {self.broken}\n"


def repair(level: int = 1, split: str = "train", source: str | None = None) -> ToolEnv:
    """The environment `argosy/repair`; ValueError for a level or a split that does not exist.

    `source`, for level 5, is a folder that `argosy tasks make` wrote.
    """
    if level not in (1, 2, 3, 4, 5) or split not in ("train", "held_out"):
        raise ValueError(f"repair has levels 1 to 5 and splits train, held_out; not level {level}, split {split!r}")
    if (level == 5) != (source is not None):
        raise ValueError(
            "level 5, and no other, needs source: a folder made by `argosy tasks make PACKAGE --out FOLDER`"
        )
    if source is not None:
        from .repair_package import RepairPackage

        return RepairPackage(split, source)
    if level == 4:
        from .repair_library import RepairLibrary

        return RepairLibrary(level, split)
    return RepairProject(level, split) if level == 3 else Repair(level, split)


class Repair(ToolEnv):
    """The workspace lives in this object; every run of its code happens in a sandbox without network."""

    def __init__(self, level: int, split: str):
        self.level, self.split = level, split
        self.max_turns = TURNS_PER_FUNCTION * len(self._places())
        self.files: dict[str, str] = {}
        self.functions: list[Function] = []

    system = "Repair the code."

    def setup(self, seed: int, options: dict[str, Any]) -> str:
        rng = random.Random(f"{self.split} {self.level} {seed}")
        self.functions = [_function(rng, *place, held_out=self.split == "held_out") for place in self._places()]
        self.files = {function.file: "" for function in self.functions}
        for function in self.functions:
            self.files[function.file] += function.source
        return self._opening()

    @tool
    async def run_tests(self) -> str:
        """Run the examples; shows those of the functions that fail."""
        report = []
        for function in self.functions:
            outcomes = await self._values(function, EXAMPLES)
            if any(outcome.error is not None for outcome in outcomes):
                return f"{function.name}: {next(outcome.error for outcome in outcomes if outcome.error)}"
            wanted = [function.wanted(x) for x in EXAMPLES]
            if [outcome.value for outcome in outcomes] != wanted:
                rows = zip(EXAMPLES, outcomes, wanted, strict=True)
                report += [f"{function.name}({x}) is {outcome.value}, want {want}" for x, outcome, want in rows]
        return "\n".join(report) or "passed"

    @tool
    def edit(self, file: str, line: int, text: str) -> str:
        """Replace one line of a file; its indentation stays.

        Args:
            file: name of the file
            line: number of the line, from 1
            text: the new line
        """
        lines = self._read(file).splitlines()
        if not 1 <= line <= len(lines):
            raise ToolError(f"{file} has lines 1 to {len(lines)}")
        old = lines[line - 1]
        lines[line - 1] = old[: len(old) - len(old.lstrip())] + text.strip()
        self.files[file] = "\n".join(lines) + "\n"
        return "ok"

    @tool
    def submit(self) -> str:
        """Hand in the code as it is now."""
        self.finish()
        return "submitted"

    async def grade(self) -> Grade:
        passed = 0
        for function in self.functions:
            outcomes = await self._values(function, HIDDEN)
            passed += all(o.error is None and o.value == function.wanted(x) for x, o in zip(HIDDEN, outcomes))
        return Grade(float(passed == len(self.functions)), {"functions": passed / len(self.functions)})

    def expert(self, rng: random.Random) -> "Expert":
        return Expert(self, rng)

    def bug(self, shown: str) -> tuple[Function, int] | None:
        """The function that the first failing example names, and the line of its formula. For the expert only."""
        named = re.match(r"(\w+)\(", shown)
        for function in self.functions:
            if named and named[1] == function.name:
                lines = self.files[function.file].splitlines()
                return function, lines.index(f"def {function.name}(x):") + 2
        return None

    def _places(self) -> Sequence[tuple[str, str]]:
        return [("f", "a.py")] if self.level == 1 else [("f", "a.py"), ("g", "a.py")]

    def _opening(self) -> str:
        return "\n".join(f"{name}\n{text.rstrip()}" for name, text in self.files.items())

    def _read(self, file: str) -> str:
        if file not in self.files:
            raise ToolError(f"no file {file!r}; there are {', '.join(self.files)}")
        return self.files[file]

    async def _values(self, function: Function, arguments: Sequence[int]) -> list[Outcome]:
        pool = SandboxPool.shared(size=SANDBOXES)
        return await pool.run_python(self.files[function.file], function.name, [[x] for x in arguments])


class RepairProject(Repair):
    """Level 3: a function with a bug in each of two files, which the agent has to open."""

    @tool
    def read_file(self, file: str) -> str:
        """Show a file.

        Args:
            file: name of the file
        """
        return self._read(file).rstrip()

    def _places(self) -> Sequence[tuple[str, str]]:
        return [("f", "a.py"), ("g", "b.py")]

    def _opening(self) -> str:
        return " ".join(self.files)


class Expert:
    """A clumsy demonstrator: after a failing example it picks the right edit only `skill` of the time, else a plausible
    wrong one; it forgets to test, gives up early and now and then writes a call that does not exist."""

    skill = 0.3
    slips = 0.03
    tests_first = 0.75
    verifies = 0.8
    persists = 0.9

    def __init__(self, env: Repair, rng: random.Random):
        self._env, self._rng = env, rng

    def __call__(self, messages: Sequence[Message]) -> str:
        last = messages[-1]
        if self._maybe(self.slips):
            return self._rng.choice([_call("run_tests")[:-1], _call("tests")])
        if last["role"] == "user":
            return _call("run_tests") if self._maybe(self.tests_first) else self._guess()
        answer = str(last["content"])
        if answer == "passed":
            return _call("submit") if self._maybe(0.9) else _call("run_tests")
        if answer == "ok":
            return _call("run_tests") if self._maybe(self.verifies) else _call("submit")
        if " want " in answer:
            return self._repair(answer) if self._maybe(self.persists) else _call("submit")
        return _call("run_tests")

    def _repair(self, failures: str) -> str:
        found = self._env.bug(failures)
        assert found, failures
        function, line = found
        first = [row for row in failures.splitlines() if row.startswith(function.name + "(")]
        numbers = [int(n) for row in first for n in re.findall(r"\d+", row.partition(" is ")[2]) if int(n) > 1]
        formula = function.wanted
        if not self._maybe(self.skill):
            formula = self._formula(numbers or CONSTANTS)
        return _call("edit", file=function.file, line=line, text=str(formula))

    def _guess(self) -> str:
        if not self._maybe(0.7):
            return _call("submit")
        function, line = self._env.bug("f(") or (None, 0)
        assert function is not None
        return _call("edit", file=function.file, line=line, text=str(self._formula(CONSTANTS)))

    def _formula(self, constants: Sequence[int]) -> Formula:
        """A wild one, but in training never one that is held out: not even as a mistake."""
        every = [Formula(operator, constant) for operator in OPERATORS for constant in constants]
        allowed = [formula for formula in every if self._env.split == "held_out" or not formula.held_out]
        return self._rng.choice(allowed) if allowed else self._formula(CONSTANTS)

    def _maybe(self, chance: float) -> bool:
        return self._rng.random() < chance


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _function(rng: random.Random, name: str, file: str, held_out: bool) -> Function:
    """A function to repair: 294 correct formulas, each broken in the constant or in the operator."""
    while True:
        wanted = Formula(rng.choice(list(OPERATORS)), rng.choice(CONSTANTS))
        if wanted.held_out != held_out:
            continue
        if rng.random() < 0.6:
            broken = Formula(wanted.operator, rng.choice(CONSTANTS))
        else:
            broken = Formula(rng.choice(list(OPERATORS)), wanted.constant)
        if broken != wanted and (held_out or not broken.held_out):
            return Function(name, file, wanted, broken)
