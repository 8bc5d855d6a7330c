"""Exercises and programs with bugs, as Exercism and QuixBugs lay them out."""

import subprocess
import sys
from pathlib import Path

import pytest
from argosy.envs.tasks import NamedTests
from argosy.envs.tasks.load import load_tasks, tasks_of

TASKS = Path(__file__).parent / "tasks"
RUNNER = Path(__file__).parents[2] / "envs" / "tasks" / "run_tests.py"


def test_an_exercise_is_a_task_and_a_malformed_one_names_file_and_field() -> None:
    loaded = load_tasks(f"directory:{TASKS / 'exercism'}")
    (task,), (problem,) = loaded.tasks, loaded.problems
    assert (problem.where, problem.field) == (str(TASKS / "exercism/practice/cubes/.meta/config.json"), "files.test")
    (stage,) = task.stages
    assert task.id == "practice/halves" and "Halve every number" in stage.instruction
    assert set(stage.files) == {"halves.py"} and b"pass" in stage.files["halves.py"]
    assert stage.solution and b"no half" in stage.solution.files["halves.py"]
    assert stage.grading.verdict == NamedTests(
        ("halves_test.py::HalvesTest::test_even_numbers", "halves_test.py::HalvesTest::test_odd_number")
    )


def test_programs_with_bugs_come_with_tests_or_with_cases() -> None:
    loaded = load_tasks(f"directory:{TASKS / 'quixbugs'}")
    assert [task.id for task in loaded.tasks] == ["quixbugs/countdown", "quixbugs/double"] and not loaded.problems
    for task in loaded.tasks:
        (file,) = task.stages[0].files
        assert file not in task.stages[0].grading.files
        assert not any("correct" in path for path in (*task.stages[0].files, *task.stages[0].grading.files))


def test_a_source_that_does_not_exist_says_what_does() -> None:
    with pytest.raises(ValueError, match="did you mean directory"):
        load_tasks("directry:x")
    with pytest.raises(ValueError, match="no folder '/nowhere'"):
        load_tasks("harbor:/nowhere")
    with pytest.raises(ValueError, match="image with python3"):
        load_tasks(f"directory:{TASKS / 'exercism'}", "docker")


def test_splits_are_stable_and_cover_all(tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / "quixbugs"
        for place in ("python_programs", "correct_python_programs"):
            (folder / place).mkdir(parents=True, exist_ok=True)
            (folder / place / f"p{number}.py").write_text(f"def p{number}(): return {place == 'python_programs'}")
        (folder / "json_testcases").mkdir(exist_ok=True)
        (folder / "json_testcases" / f"p{number}.json").write_text("[[], false]\n")
    sides = [{t.id for t in tasks_of(f"directory:{folder}", split).tasks} for split in ("all", "train", "held_out")]
    assert sides[0] == sides[1] | sides[2] and not sides[1] & sides[2] and sides[2]


def run(folder: Path, tests: str, solution: str) -> tuple[int, list[str]]:
    (folder / "thing.py").write_text(solution)
    (folder / "thing_test.py").write_text(tests)
    command = [sys.executable, str(RUNNER), "20", "thing_test.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout.splitlines()


TESTS = """
import unittest
import pytest
from thing import add

class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

@pytest.mark.parametrize("x, wanted", [(1, 2), (2, 4)])
def test_twice(x, wanted):
    if x == 1:
        pytest.skip("only 2")
    assert add(x, x) == pytest.approx(wanted)

def test_text():
    with pytest.raises(TypeError, match="unsupported"):
        add(1, "2")
"""
NAMES = ["thing_test.py::AddTest::test_add", "thing_test.py::test_twice", "thing_test.py::test_text"]


def test_the_runner_reports_each_test(tmp_path: Path) -> None:
    assert run(tmp_path, TESTS, "def add(x, y): return x + y") == (0, [f"PASSED {name}" for name in NAMES])
    exit, report = run(tmp_path, TESTS, "def add(x, y): return 3")
    assert exit == 1 and [line.split(" - ")[0] for line in report] == [
        f"{'PASSED' if name == NAMES[0] else 'FAILED'} {name}" for name in NAMES
    ]


@pytest.mark.parametrize(
    "solution",
    [
        f"import os\nprint({NAMES!r})\nos._exit(0)",
        f"import sys\nfor n in {NAMES!r}: print('PASSED', n, flush=True)\nsys.exit(0)",
        "import unittest\nraise unittest.SkipTest('no')",
        "import pytest\ndef add(x, y): pytest.skip('no')",
        "def add(x, y):\n    import os\n    os.kill(os.getpid(), 9)",
        "def add(x, y): return [0] * 10**10",
        "x = ",
        "",
    ],
)
def test_nothing_but_a_right_answer_passes(tmp_path: Path, solution: str) -> None:
    exit, report = run(tmp_path, TESTS, solution)
    assert exit == 1 and len(report) == 3 and all(line.startswith("FAILED") for line in report), report
