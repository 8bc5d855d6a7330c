"""Terminal-Bench v1 folders."""

from pathlib import Path
from typing import Any

import pytest
from argosy.envs import InvalidGrade, Sandbox
from argosy.envs.grading import apply_solution, begin, grade
from argosy.envs.tasks import NamedTests, Task
from argosy.envs.tasks.load import load_tasks
from argosy.envs.tasks.packages import pytest_archive
from argosy.envs.tasks.reading import Problem

FILES = {
    "task.yaml": "instruction: |\n  Write 42 to answer.txt.\nparser_name: pytest\nmax_agent_timeout_sec: 60\n",
    "Dockerfile": "FROM scratch\nWORKDIR /app\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "run-tests.sh": "PYTHONPATH=$PYTHONPATH:$TEST_DIR/pytest.zip python3 -m pytest $TEST_DIR/test_outputs.py -rA\n",
    "tests/test_outputs.py": "from pathlib import Path\n\n\ndef test_answer():\n"
    "    assert Path('answer.txt').read_text() == '42\\n'\n\n\nclass TestPlace:\n"
    "    def test_workdir(self):\n        assert str(Path.cwd()) == '/app'\n",
    "solution.sh": "echo 42 >answer.txt\n",
}


def read(folder: Path, backend: str = "docker", **changes: str) -> Task | Problem:
    for name, text in (FILES | changes).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    loaded = load_tasks(f"terminal-bench:{folder}", backend)  # type: ignore[arg-type]
    (found,) = (*loaded.tasks, *loaded.problems)
    return found


def test_a_task(tmp_path: Path) -> None:
    task = read(tmp_path)
    assert isinstance(task, Task), task
    (stage,) = task.stages
    assert task.seconds == 60 and task.sandbox.image == str(tmp_path) and task.sandbox.workdir == "/app"
    assert stage.grading.verdict == NamedTests(
        ("test_outputs.py::test_answer", "test_outputs.py::TestPlace::test_workdir")
    )
    assert stage.grading.shared and set(stage.grading.files) == {"/tests/run-tests.sh", "/tests/test_outputs.py"}


@pytest.mark.parametrize(
    "name, text, place, message",
    [
        ("task.yaml", "parser_name: pytest", "task.yaml: instruction", "missing"),
        ("task.yaml", "instruction: x\nparser_name: swebench", "task.yaml: parser_name", "pytest"),
        ("task.yaml", "- x", "task.yaml", "table"),
        ("docker-compose.yaml", "services: {client: {}, db: {}}", "docker-compose.yaml: services", "not supported"),
        ("tests/test_outputs.py", "def helper(): pass", "tests", "no test"),
    ],
)
def test_what_cannot_be_played_is_named(tmp_path: Path, name: str, text: str, place: str, message: str) -> None:
    problem = read(tmp_path, **{name: text})
    assert isinstance(problem, Problem) and str(problem).startswith(f"{tmp_path}/{place}"), problem
    assert message in problem.message


def test_only_tests_that_are_seen_to_pass_count(tmp_path: Path, run: Any) -> None:
    async def graded(task: Task | Problem) -> float:
        assert isinstance(task, Task), task
        (stage,) = task.stages
        sandbox = await Sandbox.open(task.sandbox)
        try:
            await begin(task, stage, sandbox)
            await apply_solution(stage, sandbox)
            return (await grade(task, stage, sandbox)).reward
        finally:
            await sandbox.close()

    (tmp_path / "sound" / "tests").mkdir(parents=True)
    (tmp_path / "sound" / "tests" / "pytest.zip").write_bytes(pytest_archive())
    assert run(graded(read(tmp_path / "sound", "bubblewrap"))) == 1.0
    with pytest.raises(InvalidGrade, match="names no test"):
        run(graded(read(tmp_path / "silent", "bubblewrap", **{"run-tests.sh": "echo all tests passed\n"})))
