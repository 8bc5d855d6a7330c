"""Harbor directories."""

from collections.abc import Callable
from pathlib import Path

import pytest
from argosy.envs.tasks import RewardFile, Task
from argosy.envs.tasks.load import load_tasks
from argosy.envs.tasks.reading import Problem

TASKS = Path(__file__).parent / "tasks" / "harbor"
Write = Callable[..., Path]


def tasks(backend: str = "docker") -> dict[str, Task]:
    loaded = load_tasks(f"harbor:{TASKS}", backend)  # type: ignore[arg-type]
    (problem,) = loaded.problems
    assert problem.where == str(TASKS / "broken/task.toml") and problem.field == "verifier.timeout_sec"
    return {task.id: task for task in loaded.tasks}


def test_a_task_of_schema_1_0() -> None:
    task = tasks()["greeting"]
    (stage,) = task.stages
    assert task.seconds == 120 and task.sandbox.limits.memory == 256 * 2**20 and task.sandbox.network == ()
    assert task.sandbox.image == str(TASKS / "greeting/environment") and task.sandbox.workdir == "/app"
    assert stage.grading.shared and stage.grading.verdict == RewardFile() and stage.grading.seconds == 60
    assert set(stage.grading.files) == {"/tests/test.sh", "/tests/wanted.txt"} and not stage.files
    assert stage.solution and set(stage.solution.files) == {"/solution/solve.sh"}


def test_steps_with_a_separate_verifier() -> None:
    task = tasks()["ledger"]
    first, second = task.stages
    assert task.combine == "mean" and task.seconds == 90 and task.sandbox.image == "python:3.12-slim"
    assert first.least == 1.0 and second.least is None and not first.grading.shared
    assert first.grading.artefacts == ("/app/ledger.txt", "/app/sum.txt")
    assert second.setup == "bash setup.sh" and set(second.files) == {"setup.sh"}
    assert second.grading.command == "export WANTED=3; bash /tests/test.sh"


def test_without_docker_a_plain_dockerfile_is_followed() -> None:
    task = tasks("bubblewrap")["greeting"]
    assert task.sandbox.backend == "bubblewrap" and task.sandbox.workdir == "/app"
    assert task.stages[0].files == {"/app/names.txt": b"ada\ngrace\n"}


def read(folder: Path, toml: str, dockerfile: str = "FROM scratch", backend: str = "docker") -> Task | Problem:
    """The one task of a folder, which has all files that it needs."""
    (folder / "environment" / "data").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data" / "a.txt").write_text("a")
    (folder / "tests" / "test.sh").write_text("true")
    loaded = load_tasks(f"harbor:{folder}", backend)  # type: ignore[arg-type]
    (found,) = (*loaded.tasks, *loaded.problems)
    return found


@pytest.mark.parametrize(
    "toml, field, message",
    [
        ('version = "2.0"', "version", "schema 1.x"),
        ("[environment]\ngpus = 1", "environment.gpus", "do not have"),
        ('[environment]\nmemory = "lots"', "environment.memory", "such as"),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.allowed_hosts", "missing"),
        ('[verifier]\nenvironment_mode = "elsewhere"', "verifier.environment_mode", "shared, separate"),
        ('[verifier.env]\nKEY = "${SECRET}"', "verifier.env.KEY", "sandboxes do not get"),
        ('[[steps]]\nname = "../up"', "steps[0].name", "letters, digits"),
        ('[[steps]]\nname = "a"\nmin_reward = {safety = 1}', "steps[0].min_reward", "only 'reward'"),
        ("steps = 3", "steps", "tables"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec", "at least 0"),
        ("not toml", "", "not TOML"),
    ],
)
def test_what_cannot_be_understood_is_named(tmp_path: Path, toml: str, field: str, message: str) -> None:
    (tmp_path / "steps" / "a" / "tests").mkdir(parents=True)
    (tmp_path / "steps" / "a" / "instruction.md").write_text("Step.")
    problem = read(tmp_path, toml)
    assert isinstance(problem, Problem), problem
    assert problem.where == str(tmp_path / "task.toml") and problem.field == field and message in problem.message


@pytest.mark.parametrize(
    "toml, network",
    [
        ("", ()),
        ("allow_internet = true", ("*",)),
        ('network_mode = "public"', ("*",)),
        ('network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]', ("pypi.org",)),
        ('network_mode = "no-network"\nallow_internet = true', ()),
    ],
)
def test_the_network_is_off_unless_the_task_says_otherwise(tmp_path: Path, toml: str, network: tuple[str, ...]) -> None:
    task = read(tmp_path, f"[environment]\n{toml}")
    assert isinstance(task, Task) and task.sandbox.network == network


def test_a_verifier_may_have_an_image_of_its_own(tmp_path: Path) -> None:
    toml = '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ndocker_image = "judge:1"\nmemory_mb = 64'
    task = read(tmp_path, toml, "FROM python:3.12\nWORKDIR /srv/app\nRUN make")
    assert isinstance(task, Task)
    judge = task.stages[0].grading.sandbox
    assert judge and judge.image == "judge:1" and judge.limits.memory == 64 * 2**20
    assert task.sandbox.workdir == judge.workdir == "/srv/app"


def test_a_dockerfile_beyond_bubblewrap_names_its_line(tmp_path: Path) -> None:
    dockerfile = "FROM debian\n# comment\nWORKDIR /srv\nENV A=1 B='two words'\nCOPY data/ in/\nRUN apt-get install x\n"
    problem = read(tmp_path / "no", "", dockerfile, "bubblewrap")
    assert isinstance(problem, Problem) and problem.where.endswith("Dockerfile:6") and "Docker" in problem.message
    task = read(tmp_path / "yes", "", dockerfile.partition("RUN")[0], "bubblewrap")
    assert isinstance(task, Task), task
    assert task.stages[0].files == {"/srv/in/a.txt": b"a"}
    assert task.sandbox.environment == (("A", "1"), ("B", "two words"))
