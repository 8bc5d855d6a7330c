"""What validation finds: each of these tasks has one thing wrong with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from argosy.deploy.cli import app
from argosy.envs import close_shared_pools
from argosy.envs.tasks import Grading, RewardFile, Solution, Stage, Task
from argosy.envs.tasks.load import Loaded, load_tasks
from argosy.envs.tasks.validation import Check, validate_tasks
from typer.testing import CliRunner

TASKS = Path(__file__).parent / "tasks"
ANSWER = b"def answer(question):\n    return question.upper().strip('?')\n"
TEST = b"from work import answer\n\nassert answer('so it is?') == 'SO IT IS'\nassert answer('really??') == 'REALLY'\n"


def task(id: str, setup: str = "", instruction: str = "Write answer.", stage: Any = None, **grading: Any) -> Task:
    judged = {"command": "python3 check.py", "files": {"check.py": TEST}, "seconds": 30.0} | grading
    whole = Stage(instruction, Grading(**judged), Solution({"work.py": ANSWER}), {"work.py": b"answer = None\n"})
    return Task(id, (replace(whole, **(stage or {})),), setup=setup)


COMMIT = "git init -q && git add -A && git commit -qm x"
WRONG = [
    (task("sound"), []),
    (task("reference", stage={"solution": Solution({"work.py": b"def answer(q): return q\n"})}), ["reference fails"]),
    (task("command", stage={"solution": Solution(command="echo no such tool; exit 3")}), ["reference fails"]),
    (task("unknown", stage={"solution": None}), ["no reference"]),
    (task("stub", command="test -e work.py"), ["stub passes"]),
    (task("empty", command="! test -s work.py || python3 check.py"), ["empty passes"]),
    (task("flaky", command="mkdir /tmp/was || exit 1; python3 check.py", shared=True), ["flaky"]),
    (
        task("silent", command="true", verdict=RewardFile()),
        ["reference fails", "stub has no grade", "empty has no grade"],
    ),
    (task("set-up", setup="echo missing; false"), ["cannot run"]),
    (task("notes", stage={"files": {"work.py": b"", "notes/draft.txt": b"# tried\n" + ANSWER}}), ["leaks"]),
    (task("instruction", instruction=f"Write this:\n{ANSWER.decode()}"), ["leaks"]),
    (task("tests", setup="mkdir /tests && cat >/tests/t.py <<'E'\n" + TEST.decode() + "E"), ["leaks"]),
]


def history(how: str) -> Task:
    """A repository that had the answer committed, and then taken back."""
    write = "cat >work.py <<'E'\n" + ANSWER.decode() + "E\n"
    return task(f"history, {how}", setup=f"cp work.py /tmp/w\n{COMMIT}\n{write}git commit -qam fix\n{how}\nrm /tmp/w")


@pytest.fixture
def validated(run: Any) -> Any:
    async def collect(loaded: Loaded, limit: int | None = None) -> list[Check]:
        found = [check async for check in validate_tasks(loaded, limit)]
        await close_shared_pools()
        return found

    return lambda *arguments: run(collect(*arguments))


def test_each_problem_is_found_and_nothing_else(validated: Any) -> None:
    branch = history("git checkout -q -b task HEAD~1")
    dangling = history("git reset -q --hard HEAD~1; git reflog expire --expire=now --all")
    every = [*WRONG, (branch, ["leaks"]), (dangling, ["leaks"])]
    found = validated(Loaded(tuple(one for one, _ in every), ()))
    for one, problems in every:
        told = [check for check in found if check.task == one.id]
        assert [check.problem for check in told] == (problems or [None]), told
    details = {check.task: check.detail for check in found}
    assert "solution of work.py in notes/draft.txt" in details["notes"]
    assert "solution of work.py in the git history" in details[branch.id]
    assert "hidden text of check.py in /tests/t.py" in details["tests"]
    assert "missing" in details["set-up"] and "no such tool" in details["command"]


def test_harbor_tasks_pass_with_all_their_steps(validated: Any) -> None:
    found = validated(load_tasks(f"harbor:{TASKS / 'harbor'}", "bubblewrap"))
    assert [(check.task, check.problem) for check in found] == [
        (str(TASKS / "harbor/broken/task.toml"), "malformed"),
        ("greeting", None),
        ("ledger", None),
    ]


def test_the_command_prints_what_is_wrong_and_ends_with_1() -> None:
    source = f"directory:{TASKS / 'exercism'}"
    ended = CliRunner().invoke(app, ["tasks", "validate", "argosy/code", f"source={source}", "--limit", "1", "--json"])
    assert ended.exit_code == 1, ended.output
    report = json.loads(ended.stdout)
    assert (report["tasks"], report["sound"]) == (2, 1) and report["problems"][0]["problem"] == "malformed"
    ended = CliRunner().invoke(app, ["tasks", "validate", f"directory:{TASKS / 'quixbugs'}", "--limit", "1"])
    assert ended.exit_code == 0 and "1 of 1 tasks are sound" in ended.output
    ended = CliRunner().invoke(app, ["tasks", "list", source])
    assert ended.exit_code == 0 and "practice/halves" in ended.output and "files.test" in ended.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["harbour:x"], "did you mean harbor"),
        (["harbor:/nowhere"], "no folder"),
        (["harbor:/nowhere", "--sandbox", "chroot"], "bubblewrap or docker"),
        (["harbor:.", "colour=red"], "colour"),
        (["harbor:.", "colour"], "name=value"),
        (["argosy/repair"], "offers no validation"),
        (["argosy/none"], "no environment"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_usage_error(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, ["tasks", "validate", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert ended.exit_code == 2 and message in ended.output, ended.output
