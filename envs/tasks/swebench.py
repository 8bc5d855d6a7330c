"""Rows of the SWE-bench family: SWE-bench, SWE-Gym, SWE-smith, R2E-Gym, SWE-rebench and SWE-rebench-V2.

A row is recognised by its fields, its image by the row or by the family's naming. With `repository`, a local clone,
the files come from there instead, at the row's base commit.

Invariant: the agent's sandbox has one commit and nothing of what came after it; the test patch, and for SWE-smith the
patch that made the bug, are nowhere in it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..sandboxes import Limits, SandboxSpec
from .harbor import Backend
from .reading import Fields, Problem
from .repository import Repository
from .task import Grading, NamedTests, Solution, Stage, Task, TestOutcomes

Report = Literal["pytest", "unittest"]
Names = tuple[tuple[str, ...], tuple[str, ...]]
"""Tests of FAIL_TO_PASS and of PASS_TO_PASS."""

SECONDS = 1800.0  # large suites, on busy machines
_LIMITS = Limits(memory=4 * 2**30, processes=512, file_size=2**30, disk=8 * 2**30)
_SWE_BENCH = re.compile(
    "(astropy|django|matplotlib|mwaskom|pallets|psf|pydata|pylint-dev|pytest-dev|scikit-learn|sphinx-doc|sympy)/"
)
_CONDA = "[ ! -f /opt/miniconda3/bin/activate ] || . /opt/miniconda3/bin/activate testbed"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_R2E = "PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning .venv/bin/python -W ignore -m pytest -rA r2e_tests"
_R2E_HIDDEN = "rm -rf /r2e_tests /root/r2e_tests /root/run_tests.sh r2e_tests run_tests.sh"
_BUG, _TESTS, _ANSWER = "/tmp/task/bug.patch", "/tmp/task/tests.patch", "/tmp/task/solution.patch"
_APPLY = "{{ git apply {how} --whitespace=nowarn {file} || patch --batch --fuzz=5 -p1 {how} -i {file}; }}"
_ONE_COMMIT = (
    "if command -v git >/dev/null; then "
    "if [ -d .git ]; then git ls-files -z >/tmp/tracked; else find . -type f -print0 >/tmp/tracked; fi; "
    "rm -rf .git; git init -q . && xargs -0r git add -f --ignore-errors -- </tmp/tracked; rm -f /tmp/tracked; "
    "git -c user.name=task -c user.email=task@localhost commit -qm task; fi"
)


def load(path: Path, backend: Backend | None, repository: Path | None) -> Iterator[Task | Problem]:
    """All rows of a .jsonl, .json or .parquet file, in their order."""
    try:
        clone = Repository(repository) if repository else None
    except ValueError as error:
        yield Problem(path, "", f"no repository to take files from: {error}")
        return
    for where, row in _rows(path):
        if isinstance(row, Problem):
            yield row
            continue
        try:
            yield _task(Fields(where, row), backend or ("bubblewrap" if clone else "docker"), clone)
        except Problem as problem:
            yield problem


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise ValueError(f'{path} needs pyarrow: pip install "argosy[parquet]", or convert it to JSONL') from None
        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    else:
        with path.open("rb") as file:  # the large ones have hundreds of megabytes
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except ValueError as error:
                        yield "", Problem(f"{path}:{number}", "", f"is not JSON: {error}")
        return
    yield from ((f"{path}[{number}]", row) for number, row in enumerate(rows))


@dataclass(frozen=True)
class _Reading:
    """What the families say in different fields."""

    id: str
    image: str
    workdir: str
    grading: Grading
    solution: Solution | None = None
    bug: str = ""
    hide: str = ""


def _task(row: Fields, backend: Backend, clone: Repository | None) -> Task:
    if clone is not None:
        return _from_clone(row, backend, clone)
    if backend != "docker":
        raise row.problem("image_name", "an image needs Docker; in bubblewrap, name a local repository")
    read = _r2e(row) if row.has("expected_output_json") else _named_tests(row)
    steps = [
        read.hide,
        _APPLY.format(how="", file=_BUG) + f" && rm -r {Path(_BUG).parent}" if read.bug else "",
        _ONE_COMMIT,
    ]
    return Task(
        id=read.id,
        stages=(
            Stage(
                instruction=_instruction(row),
                grading=read.grading,
                solution=read.solution,
                files={_BUG: read.bug.encode()} if read.bug else {},
            ),
        ),
        sandbox=SandboxSpec(
            backend="docker",
            image=read.image,
            workdir=read.workdir,
            limits=_LIMITS,
            environment=(("BASH_ENV", "/root/.bashrc"),),  # where the images of the family enter their environment
        ),
        setup=" && ".join(filter(None, steps)),
        origin=str(row.where),
    )


def _instruction(row: Fields) -> str:
    problem = row.text("problem_statement").strip()
    if not problem:
        raise row.problem("problem_statement", "is empty")
    return f"Resolve this issue in the repository of your working directory.\n\n{problem}"


def _named_tests(row: Fields) -> _Reading:
    id = row.text("instance_id")
    names, command, report = _names(row), *_command(row)
    if _is_smith(row):
        bug = row.text("patch")
        return _Reading(
            id,
            row.text("image_name"),
            "/testbed",
            _grading({}, command, report, names, sorted({name.partition("::")[0] for name in sum(names, ())})),
            _patched(bug, "-R"),
            bug,
        )
    tests = row.text("test_patch")
    files = _touched(tests)
    if not files:
        raise row.problem("test_patch", "changes no file")
    repo = row.text("repo")
    workdir = f"/{repo.rpartition('/')[2]}" if _is_v2(row) else "/testbed"
    applied = f"{_APPLY.format(how='', file=_TESTS)} && {{ {command}; }}"
    grading = _grading({_TESTS: tests.encode()}, applied, report, names, files)
    return _Reading(
        id, _image(row, id, repo), workdir, grading, _patched(row.text("patch")) if row.has("patch") else None
    )


def _is_smith(row: Fields) -> bool:
    return "swesmith" in str(row.any("image_name")) or str(row.any("repo")).startswith("swesmith/")


def _is_v2(row: Fields) -> bool:
    return row.table("install_config").has("base_image_name") is not None or row.has("language") is not None


def _image(row: Fields, id: str, repo: str) -> str:
    if named := row.has("docker_image", "image_name"):
        return row.text(named)
    owner, separator = ("swebench", "_1776_") if _SWE_BENCH.match(repo) else ("xingyaoww", "_s_")
    return f"{owner}/sweb.eval.x86_64.{id.replace('__', separator)}:latest".lower()


def _names(row: Fields) -> Names:
    """FAIL_TO_PASS and PASS_TO_PASS, each a list or a list written as JSON."""
    found = []
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = row.any(key)
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise row.problem(key, f"is not a list written as JSON: {error}") from None
        found.append(Fields(row.where, {key: value}).texts(key))
    if not found[0]:
        raise row.problem("FAIL_TO_PASS", "names no test, so there is nothing to solve")
    return found[0], found[1]


def _command(row: Fields) -> tuple[str, Report]:
    """The test command without the environment, and whose report it prints."""
    config = row.table("install_config")
    given = config.any("test_cmd") or row.any("test_cmd")
    if isinstance(given, list):
        given = " && ".join(map(str, given))
    files = _touched(row.text("test_patch", ""))
    repo = row.any("repo")
    if given is not None:
        command = str(given) if _is_v2(row) or _is_smith(row) else f"{given} {' '.join(files)}"
    elif repo == "django/django":
        command = f"{_DJANGO} {' '.join(re.sub(r'^tests/|[.]py$', '', file).replace('/', '.') for file in files)}"
    elif repo == "sympy/sympy":
        raise row.problem(
            "repo", "sympy prints a report of its own, which is not read here; give a test_cmd with pytest"
        )
    else:
        names = (
            sorted({name.partition("::")[0] for name in _names(row)[0] + _names(row)[1]}) if _is_smith(row) else files
        )
        command = f"pytest -rA --color=no -p no:cacheprovider {' '.join(names)}"
    if "pytest" in command:
        return command, "pytest"
    if "unittest" in command or "runtests.py" in command:
        return command, "unittest"
    raise row.problem(
        "install_config.test_cmd", f"{command:.60} is neither pytest nor unittest, whose reports are read"
    )


def _touched(patch: str) -> list[str]:
    """Files that a patch changes."""
    return list(dict.fromkeys(re.findall(r"^diff --git a/.* b/(.*)$", patch, re.MULTILINE)))


def _grading(files: dict[str, bytes], command: str, report: Report, names: Names, protected: list[str]) -> Grading:
    return Grading(
        command=f"{_CONDA}; {command}",
        files=files,
        verdict=NamedTests(names[0], names[1], report),
        protected=tuple(protected),
        seconds=SECONDS,
    )


def _patched(patch: str, how: str = "") -> Solution:
    return Solution({_ANSWER: patch.encode()}, _APPLY.format(how=how, file=_ANSWER))


def _r2e(row: Fields) -> _Reading:
    """Hidden tests lie in the image, where they are removed, and in the row, from which they come for grading."""
    image = row.text("docker_image")
    expected, result = _json(row, "expected_output_json"), _json(row, "execution_result_content")
    if not expected.items() or not all(isinstance(outcome, str) for _, outcome in expected.items()):
        raise row.problem("expected_output_json", "must name the outcome of each test")
    names, codes = result.texts("test_file_names"), result.texts("test_file_codes")
    if not names or len(names) != len(codes):
        raise row.problem("execution_result_content", "must have test_file_names and as many test_file_codes")
    grading = Grading(
        command=row.text("test_cmd", _R2E),
        files={f"r2e_tests/{Path(name).name}": code.encode() for name, code in zip(names, codes)},
        verdict=TestOutcomes(dict(expected.items())),
        protected=("r2e_tests/**", "run_tests.sh"),
        seconds=SECONDS,
    )
    id = f"{row.text('repo_name')}/{row.text('commit_hash')[:12]}"
    return _Reading(id, image, "/testbed", grading, _r2e_solution(row), hide=_R2E_HIDDEN)


def _json(row: Fields, key: str) -> Fields:
    try:
        return Fields(row.where, json.loads(row.text(key)), key)
    except json.JSONDecodeError as error:
        raise row.problem(key, f"is not JSON: {error}") from None


def _r2e_solution(row: Fields) -> Solution | None:
    """The files of the commit that are no tests, as they were after it."""
    if not row.has("parsed_commit_content"):
        return None
    files = {}
    for diff in _json(row, "parsed_commit_content").any("file_diffs") or ():
        path, after = diff["header"]["file"]["path"], diff.get("new_file_content")
        if after is not None and "test" not in Path(path).name:
            files[path] = after.encode()
    return Solution(files) if files else None


def _from_clone(row: Fields, backend: Backend, clone: Repository) -> Task:
    """Everything as files: no image, no patch program, no git needed in the sandbox."""
    if backend != "bubblewrap":
        raise row.problem("repository", "files of a local repository are for bubblewrap; in Docker the image has them")
    if row.has("expected_output_json"):
        raise row.problem("expected_output_json", "R2E-Gym's tests run in its images only")
    commit = row.text("base_commit")
    names, command, report = _names(row), *_command(row)
    patch, tests = row.text("patch"), row.text("test_patch", "")
    try:
        whole, patched = clone.checkout(commit), clone.checkout(commit, patch)
        judged = clone.checkout(commit, tests)
    except ValueError as error:
        raise row.problem("base_commit", f"{commit} and its patches: {error}") from None
    before, after = (patched, whole) if _is_smith(row) else (whole, patched)
    written, removed = before.changes(after)
    touched = _touched(tests) or sorted({name.partition("::")[0] for name in sum(names, ())})
    return Task(
        id=row.text("instance_id"),
        stages=(
            Stage(
                instruction=_instruction(row),
                grading=_grading(
                    {p: judged.files[p] for p in touched if p in judged.files}, command, report, names, touched
                ),
                solution=Solution(written, f"rm -f {' '.join(removed)}" if removed else ""),
                files=before.files,
            ),
        ),
        sandbox=SandboxSpec(limits=Limits(memory=2 * 2**30, processes=256)),
        setup=f"{before.finish()} && {_ONE_COMMIT}",
        origin=str(row.where),
    )
