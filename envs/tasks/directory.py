"""Directory tasks: an exercise with its tests, or a program with a bug, as two well-known layouts keep them.

Exercism's track: a folder with `.meta/config.json` (which files are the solution, the tests and the example) and
`.docs/instructions.md`. QuixBugs: `python_programs/NAME.py` with one defective line, `correct_python_programs`, and
tests in `python_testcases/test_NAME.py` or `json_testcases/NAME.json`. A path may be one exercise or any folder above.

Invariant: the agent gets the stub and the instructions; tests and example arrive only with the grading.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..sandboxes import SandboxSpec
from .reading import Fields, Problem, content, text
from .run_tests import test_names
from .task import Grading, NamedTests, Solution, Stage, Task

SECONDS = 240.0  # for all tests of a task; each has its own deadline (run_tests.py)
_RUNNER = ".argosy/run_tests.py"
_COMPARE = """
import json
from pathlib import Path

from python_programs.{name} import {name}


def plain(value):
    return json.loads(json.dumps(value, default=list))


def test_{name}():
    for line in Path("json_testcases/{name}.json").read_text().splitlines():
        if line.strip():
            arguments, expected = json.loads(line)
            assert plain({name}(*(arguments if isinstance(arguments, list) else [arguments]))) == expected
"""


def load(path: Path, sandbox: SandboxSpec) -> Iterator[Task | Problem]:
    """All tasks of a folder, in the order of their names."""
    places = _programs(path) or sorted(config.parent.parent for config in path.rglob(".meta/config.json"))
    if not places:
        yield Problem(path, "", "holds no task: neither */.meta/config.json (Exercism) nor python_programs/ (QuixBugs)")
    for place in places:
        try:
            yield _exercism(place, sandbox) if place.is_dir() else _quixbugs(place, sandbox)
        except Problem as problem:
            yield problem


def _exercism(folder: Path, sandbox: SandboxSpec) -> Task:
    config = folder / ".meta" / "config.json"
    try:
        files = Fields(config, json.loads(text(config))).table("files")
    except json.JSONDecodeError as error:
        raise Problem(config, "", f"is not JSON: {error}") from None
    solution, tests, editor = (_named(files, folder, key) for key in ("solution", "test", "editor"))
    example = files.texts(files.has("example", "exemplar") or "example")
    for key, value in (("solution", solution), ("test", tests), ("example", example)):
        if not value:
            raise files.problem(key, "names no file")
    if len(example) != len(solution):
        raise files.problem("example", f"has {len(example)} files for {len(solution)} of the solution")
    instructions = [
        folder / ".docs" / name for name in ("introduction.md", "instructions.md", "instructions.append.md")
    ]
    told = [text(file).strip() for file in instructions if file.exists() or file.name == "instructions.md"]
    stub = {name: content(folder / name) for name in solution}
    given = stub | {name: content(folder / name) for name in editor}
    beside = {
        file.name: content(file) for file in sorted(folder.iterdir()) if file.is_file() and file.name not in given
    }
    return Task(
        id=f"{folder.parent.name}/{folder.name}",
        stages=(
            Stage(
                instruction="\n\n".join([*told, f"Write your solution in {', '.join(solution)}."]),
                files=given,
                grading=_grading(beside | {name: content(folder / name) for name in tests}, tests, config, editor),
                solution=Solution({name: content(folder / source) for name, source in zip(solution, example)}),
            ),
        ),
        sandbox=sandbox,
        origin=str(config),
    )


def _named(files: Fields, folder: Path, key: str) -> list[str]:
    names = list(files.texts(key))
    for name in names:
        if not (folder / name).is_file():
            raise files.problem(key, f"{name} is not there")
    return names


def _programs(root: Path) -> list[Path]:
    """Without the modules they share and the old drivers beside them."""
    every = sorted((root / "python_programs").glob("*.py"))
    return [file for file in every if file.stem not in ("node", "__init__") and not file.stem.endswith("_test")]


def _quixbugs(program: Path, sandbox: SandboxSpec) -> Task:
    root, name = program.parent.parent, program.stem
    test, cases = root / "python_testcases" / f"test_{name}.py", root / "json_testcases" / f"{name}.json"
    if not test.exists() and not cases.exists():
        raise Problem(program, "", f"has no tests: neither {test.relative_to(root)} nor {cases.relative_to(root)}")
    shared = [root / "python_testcases" / file for file in ("load_testdata.py", "node.py")]
    own = {f"python_testcases/test_{name}.py": _COMPARE.format(name=name).encode()}
    tests = own | {str(file.relative_to(root)): content(file) for file in (test, cases, *shared) if file.exists()}
    place = f"python_programs/{name}.py"
    beside = {str(file.relative_to(root)): content(file) for file in [program.parent / "node.py"] if file.exists()}
    return Task(
        id=f"quixbugs/{name}",
        stages=(
            Stage(
                instruction=f"{place} has a bug: one line of it is wrong or missing. Its documentation, in the file, "
                "says what it should do. Repair it.",
                files={place: content(program)} | beside,
                grading=_grading(tests, list(own), program),
                solution=Solution({place: content(root / "correct_python_programs" / f"{name}.py")}),
            ),
        ),
        sandbox=sandbox,
        origin=str(program),
    )


def _grading(files: dict[str, bytes], tests: list[str], where: Path, given: Sequence[str] = ()) -> Grading:
    """`given`: what the agent may read and tests rely on."""
    names = []
    for file in tests:
        try:
            names += [f"{file}::{name}" for name in test_names(ast.parse(files[file]))]
        except SyntaxError as error:
            raise Problem(where, "files.test", f"{file} is not Python: {error}") from None
    if not names:
        raise Problem(where, "files.test", f"no test in {', '.join(tests)}")
    return Grading(
        command=f"python3 {_RUNNER} {SECONDS - 10:g} {' '.join(tests)}",
        files=files | {_RUNNER: content(Path(__file__).with_name("run_tests.py"))},
        verdict=NamedTests(tuple(names)),
        protected=(*tests, *given, ".argosy/**"),
        seconds=SECONDS,
    )
