"""Terminal-Bench v1 task folders: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh.

Invariant: only tests that are seen to pass count. Their names come from the test files, so a run that installs nothing,
tests nothing or prints what cannot be read earns nothing, whatever its exit status.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import yaml

from ..sandboxes import Limits, SandboxSpec
from .dockerfile import Dockerfile
from .harbor import Backend
from .reading import Fields, Problem, content, files_under, tasks_below, text
from .task import Grading, NamedTests, Solution, Stage, Task

_LIMITS = Limits(memory=2 * 2**30, processes=256, file_size=2**30)


def load(path: Path, backend: Backend, network: bool) -> Iterator[Task | Problem]:
    """The task in a folder, or all tasks below it, in the order of their paths."""
    return tasks_below(path, "task.yaml", lambda folder, id: _task(folder, id, backend, network))


def _task(folder: Path, id: str, backend: Backend, network: bool) -> Task:
    where = folder / "task.yaml"
    try:
        config = Fields(where, yaml.safe_load(text(where)))
    except yaml.YAMLError as error:
        raise Problem(where, "", f"is not YAML: {error}") from None
    if config.text("parser_name", "pytest") != "pytest":
        raise config.problem("parser_name", f"is {config.any('parser_name')!r}; only reports of pytest are read")
    _one_service(folder)
    dockerfile = Dockerfile(folder / "Dockerfile")
    tests = files_under(folder / "tests", "/tests/")
    tests["/tests/run-tests.sh"] = content(folder / "run-tests.sh")
    solution = folder / "solution.sh"
    stage = Stage(
        instruction=config.text("instruction").strip(),
        grading=Grading(
            command="export TEST_DIR=/tests; bash /tests/run-tests.sh",
            files=tests,
            verdict=NamedTests(_names(folder)),
            shared=True,
            seconds=config.number("max_test_timeout_sec", 60.0),
        ),
        solution=_solution(solution) if solution.exists() else None,
        files=dockerfile.files() if backend == "bubblewrap" else {},
    )
    spec = SandboxSpec(
        backend=backend,
        image=str(folder) if backend == "docker" else None,
        workdir=dockerfile.workdir,
        limits=_LIMITS if backend == "docker" else Limits(processes=256),
        network=("*",) if network else (),
        environment=tuple(sorted(dockerfile.variables.items())) if backend == "bubblewrap" else (),
    )
    return Task(id, (stage,), spec, seconds=config.number("max_agent_timeout_sec", 360.0), origin=str(where))


def _solution(script: Path) -> Solution:
    return Solution({"/solution/solution.sh": content(script)}, "bash /solution/solution.sh")


def _one_service(folder: Path) -> None:
    compose = folder / "docker-compose.yaml"
    if compose.exists():
        try:
            services = Fields(compose, yaml.safe_load(text(compose))).table("services")
        except yaml.YAMLError as error:
            raise Problem(compose, "", f"is not YAML: {error}") from None
        if len(list(services.items())) > 1:
            raise Problem(compose, "services", "more than the agent's own are not supported")


def _names(folder: Path) -> tuple[str, ...]:
    """As pytest calls them, which takes the folder of the tests for its root."""
    found: list[str] = []
    for file in sorted((folder / "tests").glob("test*.py")):
        try:
            body = ast.parse(content(file)).body
        except SyntaxError as error:
            raise Problem(file, "", f"is not Python: {error}") from None
        for node in body:
            inner = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else []
            prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
            for test in [node, *inner]:
                if isinstance(test, ast.FunctionDef) and test.name.startswith("test"):
                    if any("parametrize" in ast.unparse(decorator) for decorator in test.decorator_list):
                        raise Problem(file, test.name, "is parametrized, so the names of its tests are not known")
                    found.append(f"{file.name}::{prefix}{test.name}")
    if not found:
        raise Problem(folder / "tests", "", "holds no test whose name could be known")
    return tuple(found)
