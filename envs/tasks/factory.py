"""Repair tasks from any pure-Python package with tests: a bug is put in, and its tests tell what it broke.

Making and playing are apart. `make` tries mutations in sandboxes and keeps those that some tests notice; `save` writes
them into a folder; `load` reads `Task`s from it, without network. The same package and seed give the same tasks.

Invariant: the failing tests were seen to fail, and the passing ones to pass, in two runs of the broken source, after
two of the untouched one. A test file in which something fails is none of the files that the agent gets. All bugs of a
task are on one side of the split (`Task.family`), so a function that is held out is never broken in training.
"""

import hashlib
import itertools
import json
import random
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ..sandboxes import SandboxSpec
from ..sources.order import in_split
from .laboratory import Baseline, Break, Fate, broken, file_of, open_laboratory
from .mutate import Edit, Mutation, mutations
from .packages import Package, is_test, pytest_archive
from .reading import Fields, Problem, content, files_under, text
from .task import Grading, NamedTests, Solution, Stage, Task

T = TypeVar("T")

FORMAT = 1
SPARE = 2  # of a few mutations, so many are noticed by no test
TELLING = 16  # characters
SECONDS = 120.0  # of grading; the tests of a file take ten at most
HOW = "Tests that you cannot see decide. Run those that you can with `sh .argosy/test.sh`, or only some of its files."
_TEST_COMMAND = """cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}$PWD/{archive}:$PWD/{path}"
export PYTHONNOUSERSITE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec python3 -B -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -rpfE --show-capture=no "$@"
"""
_ADDRESS = re.compile(r"x[0-9a-f]{8,16}\b")  # another in every process
_ARCHIVE, _SCRIPT = ".argosy/pytest.zip", ".argosy/test.sh"


class Hint(StrEnum):
    """What the agent is told of the place."""

    NONE = "none"
    FILE = "file"
    FUNCTION = "function"


@dataclass(frozen=True)
class Bug:
    """What makes a task of a package."""

    mutations: Break
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    instruction: str


@dataclass
class Made:
    """The tasks, and what became of every mutation that was tried."""

    bugs: list[Bug] = field(default_factory=list)
    fates: Counter[Fate] = field(default_factory=Counter)
    candidates: int = 0
    tests: int = 0
    baseline_seconds: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        tried = self.fates.total()
        shares = ", ".join(f"{count} {fate} ({count / tried:.0%})" for fate, count in self.fates.most_common())
        return (
            f"{len(self.bugs)} tasks in {self.seconds:.0f} s, {self.baseline_seconds:.0f} s of them for the untouched "
            f"package: {self.tests} tests, {self.candidates} mutations that they run, {tried} tried: {shares or 'none'}"
        )


async def make(
    package: Package,
    count: int,
    seed: int = 0,
    bugs: int = 1,
    hint: Hint = Hint.NONE,
    jobs: int = 2,
    tell: Callable[[str], None] = lambda line: None,
) -> Made:
    """Up to `count` tasks of `bugs` bugs each, with `jobs` sandboxes; fewer where the tests notice no more."""
    if count < 1 or bugs < 1 or jobs < 1:
        raise ValueError(f"count, bugs and jobs must be at least 1, not {count}, {bugs}, {jobs}")
    began, made = time.monotonic(), Made()
    async with open_laboratory(package, jobs) as laboratory:
        baseline = await laboratory.baseline()
        made.tests, made.baseline_seconds = len(baseline.tests), time.monotonic() - began
        tell(f"{package.name} {package.version}: {made.tests} tests pass quickly and reliably")
        single = _single(package, baseline, random.Random(f"{seed} {package.name} {package.version}"))
        made.candidates = len(single)

        async def search(variants: Iterator[Break], wanted: int) -> list[Bug]:
            found: list[Bug] = []
            while len(found) < wanted:
                size = min(laboratory.capacity, wanted - len(found) + SPARE)
                if not (wave := list(itertools.islice(variants, size))):
                    break
                for variant, verdict in zip(wave, await laboratory.judge(baseline, wave)):
                    made.fates[verdict.fate] += 1
                    if verdict.fate == "task":
                        told = instruction(package, variant, len(verdict.failing), verdict.example, hint)
                        found.append(Bug(variant, verdict.failing, verdict.passing, told))
                tell(f"{len(found)} of {wanted} bugs after {made.fates.total()} mutations")
            return found[:wanted]

        made.bugs = await search(_secret(package, single), count if bugs == 1 else (count + SPARE) * bugs)
        if bugs > 1:
            made.bugs = await search(_together(package, made.bugs, bugs), count)
    made.seconds = time.monotonic() - began
    return made


def _single(package: Package, baseline: Baseline, rng: random.Random) -> list[Break]:
    """Every mutation that a test runs; functions take turns, and so do the kinds of mutations of each."""
    queues: list[list[Break]] = []
    for file in package.sources:
        try:
            found = mutations(package.files[file].decode())
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates, and leftovers of Python 2
        functions: dict[str, dict[str, list[Break]]] = {}
        for mutation in found:
            variant = ((file, mutation),)
            if baseline.reaching(variant):
                functions.setdefault(mutation.function, {}).setdefault(mutation.operator, []).append(variant)
        for kinds in functions.values():
            groups = list(kinds.values())
            rng.shuffle(groups)
            for group in groups:
                rng.shuffle(group)
            queues.append(_take_turns(groups))
    rng.shuffle(queues)
    return _take_turns(queues)


def _secret(package: Package, variants: Sequence[Break]) -> Iterator[Break]:
    """Without those whose repair can be copied, because the lost lines also stand in another file."""
    known = {file: _telling(data) for file, data in package.files.items()}
    for variant in variants:
        changed = broken(package.files, variant)
        lost = frozenset[str]().union(*(known[file] - _telling(now.encode()) for file, now in changed.items()))
        if not lost or not any(lost <= lines for file, lines in known.items() if file not in changed):
            yield variant


def _telling(source: bytes) -> frozenset[str]:
    """Lines that are long enough to be no coincidence."""
    lines = source.decode(errors="replace").splitlines()
    return frozenset(stripped for line in lines if len(stripped := line.strip()) >= TELLING)


def _take_turns(queues: Sequence[Sequence[T]]) -> list[T]:
    return [item for each in itertools.zip_longest(*queues) for item in each if item is not None]


def _together(package: Package, single: Sequence[Bug], bugs: int) -> Iterator[Break]:
    """Bugs of different functions, all on one side of the split."""
    for side in ("train", "held_out"):
        waiting = [bug for bug in single if in_split(family(package.name, bug.mutations), side)]
        while True:
            group: dict[str, Bug] = {}
            for bug in waiting:
                if len(group) < bugs:
                    group.setdefault(family(package.name, bug.mutations), bug)
            if len(group) < bugs:
                break
            waiting = [bug for bug in waiting if bug not in group.values()]
            yield tuple(each for bug in group.values() for each in bug.mutations)


def family(package: str, mutations: Break) -> str:
    """The function, or the first of several: those are on the same side."""
    file, mutation = mutations[0]
    return f"{package}/{file}:{mutation.function}"


def instruction(package: Package, mutations: Break, failing: int, example: tuple[str, str], hint: Hint) -> str:
    """A report of what goes wrong, as somebody would write it who does not know why."""
    code, message = (_ADDRESS.sub("x...", textwrap.dedent(part).strip("\n")) for part in example)
    several = len(mutations) > 1
    parts = [f"{package.name} {package.version} does not do what it should. This worked before:"]
    parts += [textwrap.indent(_last_lines(code, 20), "    ")] if code else []
    parts += ["Now it ends with:" if code else "It ends with:", textwrap.indent(_first_lines(message, 10), "    ")]
    if failing > 1:
        parts.append(f"{failing - 1} other checks fail too, some perhaps in another way.")
    where = f"in {', '.join(package.roots)}"
    if hint == Hint.FILE:
        where = f"in {', '.join(dict.fromkeys(file for file, _ in mutations))}"
    elif hint == Hint.FUNCTION:
        where = f"in {', '.join(f'{mutation.function} ({file})' for file, mutation in mutations)}"
    what = f"There are {len(mutations)} mistakes {where}: find and repair them" if several else ""
    parts.append(f"{what or f'There is a mistake {where}: find and repair it'}, and change nothing else.")
    return "\n\n".join(parts)


def _last_lines(text: str, most: int) -> str:
    return textwrap.dedent("\n".join(text.splitlines()[-most:]))


def _first_lines(text: str, most: int) -> str:
    return "\n".join(line[:300] for line in text.splitlines()[:most])


# A folder of tasks: the package once, and a line for each task.


def check_folder(folder: Path) -> None:
    """FileExistsError rather than to mix with what is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: name a new folder")


def save(package: Package, bugs: Sequence[Bug], folder: Path) -> None:
    check_folder(folder)
    about = {"format": FORMAT, "name": package.name, "version": package.version}
    about |= {"roots": package.roots, "tests": package.tests}
    files = {f"package/{name}": data for name, data in package.files.items()} | {"pytest.zip": pytest_archive()}
    files["factory.json"] = json.dumps(about, indent=1).encode()
    files["tasks.jsonl"] = "".join(json.dumps(asdict(bug)) + "\n" for bug in bugs).encode()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def load(folder: Path, sandbox: SandboxSpec) -> Iterator[Task | Problem]:
    """All tasks of a folder that `save` wrote."""
    package, archive = load_package(folder), content(folder / "pytest.zip")
    for number, line in enumerate(text(folder / "tasks.jsonl").splitlines(), 1):
        where = f"{folder / 'tasks.jsonl'}:{number}"
        try:
            yield _task(package, load_bug(where, package, line), archive, sandbox, where)
        except Problem as problem:
            yield problem


def load_package(folder: Path) -> Package:
    path = folder / "factory.json"
    try:
        about = Fields(path, json.loads(text(path)))
    except json.JSONDecodeError as error:
        raise Problem(path, "", f"is not JSON: {error}") from None
    if about.any("format") != FORMAT:
        raise about.problem("format", f"must be {FORMAT}: make the tasks anew with `argosy tasks make`")
    files = files_under(folder / "package")
    return Package(about.text("name"), about.text("version"), files, about.texts("roots"), about.texts("tests"))


def load_bug(where: str, package: Package, line: str) -> Bug:
    try:
        row = Fields(where, json.loads(line))
        found = tuple((str(file), Mutation(**m | {"edit": Edit(**m["edit"])})) for file, m in row.any("mutations"))
        broken(package.files, found)
    except (ValueError, TypeError, KeyError) as error:
        raise Problem(where, "mutations", f"cannot be applied to the package beside it: {error!r:.200}") from None
    if not found or not row.texts("failing"):
        raise row.problem("failing" if found else "mutations", "is empty")
    return Bug(found, row.texts("failing"), row.texts("passing"), row.text("instruction"))


def _task(package: Package, bug: Bug, archive: bytes, sandbox: SandboxSpec, origin: str) -> Task:
    script = _TEST_COMMAND.format(archive=_ARCHIVE, path=package.path).encode()
    tools = {_ARCHIVE: archive, _SCRIPT: script}
    changed = {file: source.encode() for file, source in broken(package.files, bug.mutations).items()}
    tests = {file: data for file, data in package.files.items() if is_test(file)}
    hidden = {file_of(test) for test in bug.failing}
    judging = sorted({file_of(test) for test in (*bug.failing, *bug.passing)})
    given = {file: data for file, data in package.files.items() if file not in hidden} | changed | tools
    return Task(
        id=_id(package, bug.mutations),
        stages=(
            Stage(
                instruction=f"{bug.instruction}\n\n{HOW}",
                files=given,
                grading=Grading(
                    command=f"sh {_SCRIPT} {' '.join(judging)}",
                    files=tests | tools,
                    verdict=NamedTests(bug.failing, bug.passing),
                    artefacts=package.roots,
                    protected=tuple(tests),
                    seconds=SECONDS,
                ),
                solution=Solution({file: package.files[file] for file in changed}),
            ),
        ),
        sandbox=sandbox,
        family=family(package.name, bug.mutations),
        origin=origin,
    )


def _id(package: Package, mutations: Break) -> str:
    file, mutation = mutations[0]
    digest = hashlib.sha256(json.dumps([package.version, [(f, asdict(m.edit)) for f, m in mutations]]).encode())
    return f"{package.name}/{PurePosixPath(file).stem}.{mutation.function}-{digest.hexdigest()[:8]}"
