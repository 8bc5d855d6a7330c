"""Warm sandboxes in which a package is broken in many ways, to see which of its tests notice.

Invariant: what comes out depends on the package and the mutations, not on the order or the speed of the machine: every
run begins from the untouched files in a fork of its own, deadlines count processor time, and whatever differs between
two runs with different hash seeds is thrown away as flaky.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UnusablePackage
from ..sandboxes import Sandbox
from .mutate import Edit, Mutation, apply
from .packages import Package, pytest_archive

Fate = Literal["task", "equivalent", "hangs", "breaks everything", "flaky"]
Break = tuple[tuple[str, Mutation], ...]
"""One or several mutations, each with its file."""

BATCH = 12  # variants per command: they share one start of pytest
EACH = 2.0  # processor seconds of one test
QUICK = 0.3  # processor seconds: a test that takes longer judges nothing
FILE_SECONDS = 10.0  # nor do the tests of a file that takes longer
MOST = 0.5  # of all tests may fail; beyond, the package is broken and not the function
BASELINE_SECONDS = 300.0
VARIANT_SECONDS = 90.0  # by the clock: sleeping for ever takes no processor time
MEMORY = 384 * 2**20
_RUNNER = Path(__file__).with_name("run_mutants.py")
_PLAIN = re.compile(r"[!-~]+")  # other names cannot be told apart in a log


@dataclass(frozen=True)
class Baseline:
    """The untouched package: its quick and reliable tests, and which of them run a line of a file."""

    tests: frozenset[str]
    covering: Mapping[tuple[str, int], frozenset[str]]

    def reaching(self, mutations: Break) -> frozenset[str]:
        found = [self.covering.get((f, line), ()) for f, m in mutations for line in range(m.first, m.last + 1)]
        return frozenset[str]().union(*found)

    def of_files(self, files: set[str]) -> frozenset[str]:
        return frozenset(test for test in self.tests if file_of(test) in files)


@dataclass(frozen=True)
class Verdict:
    """What became of one variant."""

    fate: Fate
    failing: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    example: tuple[str, str] = ("", "")
    """Of what fails: the test up to its failing statement, and what it said."""


def file_of(test: str) -> str:
    return test.partition("::")[0]


@asynccontextmanager
async def open_laboratory(package: Package, jobs: int) -> AsyncIterator["Laboratory"]:
    sandboxes: list[Sandbox] = []
    try:
        for _ in range(jobs):
            sandboxes.append(await Sandbox.open())
            await _furnish(sandboxes[-1], package)
        yield Laboratory(package, sandboxes)
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def _furnish(sandbox: Sandbox, package: Package) -> None:
    for name, content in package.files.items():
        await sandbox.write(name, content)
    await sandbox.write("/tmp/run_mutants.py", _RUNNER.read_bytes())
    await sandbox.write("/tmp/pytest.zip", pytest_archive())
    done = await sandbox.exec("python3 -m zipfile -e /tmp/pytest.zip /tmp/pytest")  # unpacked, it is compiled once
    if done.exit != 0:
        raise UnusablePackage(f"pytest cannot be unpacked in a sandbox: {done.output[-500:]}")


class Laboratory:
    """Made by `open_laboratory`."""

    def __init__(self, package: Package, sandboxes: Sequence[Sandbox]):
        self.package, self._sandboxes = package, sandboxes
        self.capacity = BATCH * len(sandboxes)
        """Variants that are judged at once."""

    async def baseline(self) -> Baseline:
        """`UnusablePackage` when the tests do not work before anything is changed."""
        whole: dict[str, Any] = {"write": {}, "files": self.package.tests, "only": None, "seconds": BASELINE_SECONDS}
        plain = [(await self._run(0, [whole | {"trace": False}], seed))[0] for seed in (1, 2)]
        for run in plain:
            if run["ended"] != "done":
                raise UnusablePackage(
                    f"before anything is changed the tests of {self.package.name} {_did(run)}; leave out the slow ones"
                )
        passed = [test for test in plain[0]["outcomes"] if all(run["outcomes"].get(test) == "passed" for run in plain)]
        if not passed:
            raise UnusablePackage(f"no test of {self.package.name} passes before anything is changed: {_why(plain[0])}")
        spent: Counter[str] = Counter()
        for test, seconds in plain[0]["seconds"].items():
            spent[file_of(test)] += seconds
        quick = [test for test in passed if plain[0]["seconds"][test] <= QUICK and spent[file_of(test)] <= FILE_SECONDS]
        tests = frozenset(test for test in quick if _PLAIN.fullmatch(test))
        if len(tests) < 2:
            raise UnusablePackage(
                f"{self.package.name} needs 2 tests that pass within {QUICK:g} s, and has {len(tests)}"
            )
        only = sorted(tests)
        traced = (await self._run(0, [whole | {"files": _files(tests), "only": only, "trace": True}], 1))[0]
        if traced["ended"] != "done":
            raise UnusablePackage(f"the tests of {self.package.name} {_did(traced)} while their lines are traced")
        return Baseline(
            tests,
            {
                (file, int(line)): tests.intersection(covering)
                for file, lines in traced["lines"].items()
                for line, covering in lines.items()
            },
        )

    async def judge(self, baseline: Baseline, variants: Sequence[Break]) -> list[Verdict]:
        """What each of at most `capacity` comes to, in their order."""
        share = -(-len(variants) // len(self._sandboxes))
        shares = [variants[start : start + share] for start in range(0, len(variants), share)]
        judged = await asyncio.gather(*(self._judge(number, baseline, share) for number, share in enumerate(shares)))
        return [verdict for share in judged for verdict in share]

    async def _judge(self, number: int, baseline: Baseline, variants: Sequence[Break]) -> list[Verdict]:
        """First with the tests that reach the change; what looks good, once more with the whole files of these."""
        reaching = [baseline.reaching(each) for each in variants]
        first = await self._variants(number, list(zip(variants, reaching)), 3)
        verdicts = [_first_verdict(run, tests, baseline) for run, tests in zip(first, reaching)]
        good = [index for index, verdict in enumerate(verdicts) if verdict.fate == "task"]
        graded = {index: baseline.of_files(set(_files(reaching[index]))) for index in good}
        again = await self._variants(number, [(variants[index], graded[index]) for index in good], 4)
        for index, run in zip(good, again):
            failing, passing = _failing(run, graded[index]), graded[index] - _failing(run, graded[index])
            if run["ended"] != "done" or failing != set(verdicts[index].failing):
                verdicts[index] = Verdict("flaky")
            elif not passing:
                verdicts[index] = Verdict("breaks everything")
            else:
                example = _example(first[index]["failures"], reaching[index])
                verdicts[index] = Verdict("task", tuple(sorted(failing)), tuple(sorted(passing)), example)
        return verdicts

    async def _variants(
        self, number: int, variants: Sequence[tuple[Break, frozenset[str]]], hash_seed: int
    ) -> list[dict[str, Any]]:
        runs = [
            {
                "write": broken(self.package.files, mutations),
                "files": _files(tests),
                "only": sorted(tests),
                "trace": False,
                "seconds": VARIANT_SECONDS,
            }
            for mutations, tests in variants
        ]
        return await self._run(number, runs, hash_seed) if runs else []

    async def _run(self, number: int, runs: Sequence[Mapping[str, Any]], hash_seed: int) -> list[dict[str, Any]]:
        sandbox = self._sandboxes[number]
        job = {"path": self.package.path, "sources": self.package.sources, "each": EACH, "memory": MEMORY, "runs": runs}
        await sandbox.write("/tmp/job.json", json.dumps(job))
        command = f"PYTHONHASHSEED={hash_seed} {PYTHON} /tmp/run_mutants.py /tmp/job.json /tmp/result.json"
        result = await sandbox.exec(command, timeout=30.0 + sum(run["seconds"] for run in runs), fresh=True)
        if result.exit == 0:
            return json.loads(await sandbox.read("/tmp/result.json"))
        if result.reason is None:
            raise UnusablePackage(f"pytest does not run in the sandbox: {result.output[-500:].strip()}")
        if len(runs) == 1:
            await _furnish(sandbox, self.package)  # it ended with the package changed
            return [{"ended": "died"}]
        return [answer for run in runs for answer in await self._run(number, [run], hash_seed)]


PYTHON = "PYTHONPATH=/tmp/pytest PYTHONNOUSERSITE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3"


def broken(files: Mapping[str, bytes], mutations: Break) -> dict[str, str]:
    """The changed files."""
    edits: dict[str, list[Edit]] = {}
    for file, mutation in mutations:
        edits.setdefault(file, []).append(mutation.edit)
    return {file: apply(files[file].decode(), changes) for file, changes in edits.items()}


def _files(tests: frozenset[str]) -> list[str]:
    return sorted({file_of(test) for test in tests})


def _failing(run: Mapping[str, Any], tests: frozenset[str]) -> frozenset[str]:
    return frozenset(test for test in tests if run.get("outcomes", {}).get(test) != "passed")


def _first_verdict(run: Mapping[str, Any], tests: frozenset[str], baseline: Baseline) -> Verdict:
    failing = _failing(run, tests)
    starved = any(message.startswith("MemoryError") for _, message in run.get("failures", {}).values())
    if run["ended"] == "hang" or starved:
        return Verdict("hangs")
    if run["ended"] == "died" or run["errors"] or len(failing) > MOST * len(baseline.tests):
        return Verdict("breaks everything")
    return Verdict("task", tuple(sorted(failing))) if failing else Verdict("equivalent")


def _example(failures: Mapping[str, Sequence[str]], tests: frozenset[str]) -> tuple[str, str]:
    """A wrong value tells more than a crash, and a short example more than a long one."""
    known = [(code, message) for test, (code, message) in sorted(failures.items()) if test in tests]
    return min(known, key=lambda pair: (not pair[0], "assert" not in pair[1][:10].lower(), len(pair[0]) + len(pair[1])))


def _did(run: Mapping[str, Any]) -> str:
    if run["ended"] == "hang":
        return f"do not end (within {EACH:g} s of the processor each, {BASELINE_SECONDS:g} s together)"
    return "end their interpreter"


def _why(run: Mapping[str, Any]) -> str:
    """The commonest last line of what went wrong."""
    texts = [*run["errors"].values(), *(message for _, message in run["failures"].values())]
    lines = Counter(text.strip().splitlines()[-1][:300] for text in texts if text.strip())
    if not lines:
        return "pytest finds no test in its files"
    missing = [line for line in lines if "No module named" in line]
    fix = "; only the standard library and pytest are there" if missing else ""
    return f"{missing[0] if missing else lines.most_common(1)[0][0]}{fix}"
