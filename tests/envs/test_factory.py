"""Tasks made from a package: what fails fails because of the bug, the repair passes, and the answer is nowhere."""

import asyncio
import difflib
import io
import json
import os
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from argosy.deploy.cli import app
from argosy.envs import Message, Sandbox, ToolCall, UnusablePackage, close_shared_pools, make_env
from argosy.envs.grading import apply_solution, grade, prepare
from argosy.envs.tasks import NamedTests, factory, packages
from argosy.envs.tasks.load import load_tasks, tasks_of
from typer.testing import CliRunner

pytestmark = pytest.mark.timeout(400)  # dozens of runs of pytest in sandboxes

TALLY = {
    "pyproject.toml": '[project]\nname = "tally"\nversion = "1.2"\n',
    "tally/__init__.py": "from .counts import *\nfrom .places import *\n",
    "tally/counts.py": '''"""Counting, with care."""


def tally(items):
    """How often each occurs."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1   # kept as it is
    return counts


def common(items, most=1):
    """The most frequent items, the first of equal ones first."""
    counts = tally(items)
    ordered = sorted(counts, key=lambda item: -counts[item])
    return ordered[:most]


def halvings(number):
    """How often it can be halved before it is below one."""
    steps = 0
    while number >= 1:
        number = number / 2
        steps += 1
    return steps


def never_run(a, b):
    return a < b
''',
    "tally/places.py": '''def places(items, wanted):
    """Where something occurs."""
    return [place for place, item in enumerate(items) if item == wanted]


def between(number, low, high):
    """Whether it lies in the range, both ends included."""
    if low > high:
        low, high = high, low
    return low <= number and number <= high
''',
    "tests/test_counts.py": """import pytest
from tally import common, halvings, tally


def test_tally():
    assert tally("aab") == {"a": 2, "b": 1}


@pytest.mark.parametrize("most, expected", [(1, ["x"]), (2, ["x", "y"])])
def test_common(most, expected):
    assert common("yxx", most) == expected


def test_common_has_a_default():
    assert common("aab") == ["a"]


def test_halvings():
    assert halvings(8) == 4
    assert halvings(0.5) == 0
""",
    "tests/test_places.py": """import unittest
from tally import between, places


class TestPlaces(unittest.TestCase):
    def test_places(self):
        self.assertEqual(places([5, 6, 5], 5), [0, 2])

    def test_between(self):
        self.assertTrue(between(2, 1, 3))
        self.assertTrue(between(2, 3, 1))
        self.assertTrue(between(1, 1, 3) and between(3, 1, 3))
        self.assertFalse(between(4, 1, 3))
        self.assertFalse(between(0, 1, 3))
""",
    "tests/test_trouble.py": """import time

from tally import tally


def test_fails_from_the_start():
    assert tally("a") == {}


def test_depends_on_the_hash_seed():
    assert tally("a") and list({f"item {number}" for number in range(9)})[0] == "item 3"


def test_is_slow():
    began = time.process_time()
    while time.process_time() < began + 0.4:
        assert tally("ab")
""",
}


@dataclass
class Tally:
    source: Path
    package: packages.Package
    made: factory.Made
    folder: Path


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tally]:
    """A package, and tasks that were made of it."""
    source = write(tmp_path_factory.mktemp("source") / "tally", TALLY)
    package = packages.find(str(source))
    made = asyncio.run(factory.make(package, count=10, seed=19))
    folder = tmp_path_factory.mktemp("tasks")
    factory.save(package, made.bugs, folder)
    yield Tally(source, package, made, folder)


def test_mutations_are_sorted_by_what_the_tests_say(tally: Tally) -> None:
    fates = tally.made.fates
    assert fates["task"] >= 10 and fates["hangs"] >= 1, tally.made
    assert set(fates) <= {"task", "equivalent", "hangs", "breaks everything", "flaky"}
    assert tally.made.tests == 7  # neither the one that fails, nor the flaky one, nor the slow one
    assert {mutation.function for bug in tally.made.bugs for _, mutation in bug.mutations} == {
        "tally",
        "common",
        "halvings",
        "places",
        "between",
    }


def test_the_same_seed_makes_the_same_tasks(tally: Tally) -> None:
    again = asyncio.run(factory.make(tally.package, count=2, seed=19, jobs=1))
    assert again.bugs == tally.made.bugs[:2]


def test_a_task_hides_what_it_must_and_tells_what_goes_wrong(tally: Tally) -> None:
    loaded = load_tasks(f"factory:{tally.folder}")
    assert not loaded.problems and len(loaded.tasks) == len(tally.made.bugs)
    for task in loaded.tasks:
        (stage,) = task.stages
        assert isinstance(stage.grading.verdict, NamedTests) and stage.solution
        failing = {test.partition("::")[0] for test in stage.grading.verdict.fail_to_pass}
        assert failing and not failing & stage.files.keys()
        assert not [name for name in stage.grading.verdict.pass_to_pass if "trouble" in name]
        ((file, right),) = stage.solution.files.items()
        assert right == TALLY[file].encode() != stage.files[file]
        broken = stage.files[file].decode().splitlines()
        changes = [line for line in difflib.ndiff(right.decode().splitlines(), broken) if line[0] in "+-"]
        assert 1 <= len(changes) <= 5, changes
        lost = [line[1:].strip() for line in changes if line[0] == "-"]
        assert not any(line in stage.instruction for line in lost if len(line) > 8)
        assert "tally 1.2 does not do what it should" in stage.instruction
        assert "assert" in stage.instruction or "Error" in stage.instruction


def test_in_the_clean_room_the_repair_passes_and_the_bug_fails(tally: Tally) -> None:
    async def judged() -> None:
        for task in load_tasks(f"factory:{tally.folder}").tasks[:2]:
            sandbox = await Sandbox.open(task.sandbox)
            await prepare(task, task.stages[0], sandbox)
            assert (await grade(task, task.stages[0], sandbox)).reward == 0.0
            visible = await sandbox.exec("sh .argosy/test.sh")
            assert "passed" in visible.output, visible
            await apply_solution(task.stages[0], sandbox)
            assert (await grade(task, task.stages[0], sandbox)).reward == 1.0, task.id
            await sandbox.close()

    asyncio.run(judged())


def test_an_agent_plays_it(tally: Tally) -> None:
    async def episode() -> float:
        env = make_env("argosy/code", source=f"factory:{tally.folder}", sandboxes=1)
        await env.start(0)
        ((file, right),) = env.task.stages[0].solution.files.items()  # type: ignore[attr-defined]
        await env.act([ToolCall("write_file", {"path": file, "content": right.decode()})], "")
        assert (await env.act([ToolCall("submit", {})], "")).done
        reward = (await env.score()).reward
        await env.stop()
        await close_shared_pools()
        return reward

    assert asyncio.run(episode()) == 1.0


@pytest.mark.parametrize("skill", [1.0, 0.0])
def test_it_is_a_level_of_the_demo(tally: Tally, skill: float) -> None:
    async def episode() -> tuple[float, list[Message]]:
        env = make_env("argosy/repair", level=5, source=str(tally.folder))
        messages = await env.start(3)
        expert = env.expert(random.Random(0))
        expert.skill = skill
        messages += (await env.act([ToolCall("run_tests", {})], "")).messages
        done = False
        while not done:
            call = json.loads(expert(messages).splitlines()[1])
            step = await env.act([ToolCall(call["name"], call["arguments"])], "")
            messages, done = messages + step.messages, step.done
        reward = (await env.score()).reward
        await env.stop()
        await close_shared_pools()
        return reward, messages

    reward, messages = asyncio.run(episode())
    assert reward == skill
    assert "There is a mistake in tally" in messages[1]["content"] and ".argosy" not in messages[1]["content"]
    assert "passed" in messages[2]["content"] or "fails_from_the_start" in messages[2]["content"]


@pytest.mark.parametrize(
    "kwargs", [{"level": 5}, {"level": 4, "source": "x"}, {"level": 6}, {"level": 5, "source": "x"}]
)
def test_a_level_says_what_it_needs(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs source|levels 1 to 5|no folder 'x'"):
        make_env("argosy/repair", **kwargs)


def test_a_held_out_function_is_never_trained_on(tally: Tally) -> None:
    families = {
        split: {task.family for task in tasks_of(f"factory:{tally.folder}", split).tasks}
        for split in ("train", "held_out")
    }
    assert not families["train"] & families["held_out"]
    assert sum(map(len, families.values())) == 5


def test_several_bugs_of_a_task_are_in_different_functions(tally: Tally) -> None:
    made = asyncio.run(factory.make(tally.package, count=1, bugs=2, hint=factory.Hint.FUNCTION, jobs=1))
    assert made.bugs
    for bug in made.bugs:
        (_, first), (_, second) = bug.mutations
        assert first.function != second.function
        assert "There are 2 mistakes in" in bug.instruction and f"{second.function} (tally/" in bug.instruction


def test_a_source_archive_is_the_same_package(tally: Tally, tmp_path: Path) -> None:
    archive = tmp_path / "tally-1.2.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tally.source, "tally-1.2")
    assert packages.find(str(archive)) == tally.package


def without(*names: str) -> dict[str, str]:
    return {name: text for name, text in TALLY.items() if not name.startswith(names)}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (without("tests/"), "comes without tests"),
        (without("tally/"), "no Python package"),
        ({**TALLY, "tally/fast.pyx": ""}, r"compiled parts \(tally/fast.pyx\)"),
        ({**TALLY, "pyproject.toml": "[project"}, "pyproject.toml cannot be read"),
    ],
)
def test_a_package_that_cannot_be_used(files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UnusablePackage, match=complaint):
        packages.find(str(write(tmp_path / "tally", files)))


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        ("import numpie\n\ndef test_a():\n    pass\n", "No module named 'numpie'; only the standard library"),
        ("def test_a():\n    assert 1 == 2\n", "no test of tally passes before anything is changed: .*1 == 2"),
        ("def test_a():\n    pass\n", "needs 2 tests"),
        ("import os\n\ndef test_a():\n    os._exit(0)\n", "end their interpreter"),
    ],
)
def test_tests_that_do_not_work_before_anything_is_changed(test: str, complaint: str, tmp_path: Path) -> None:
    package = packages.find(str(write(tmp_path / "tally", {**without("tests/"), "tests/test_a.py": test})))
    with pytest.raises(UnusablePackage, match=complaint):
        asyncio.run(factory.make(package, count=1, jobs=1))


def test_what_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(UnusablePackage, match="give the path of its source archive"):
        packages.find("tally-that-is-nowhere")
    with pytest.raises(UnusablePackage, match="no name for pip"):
        packages.find("../not there")
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    with pytest.raises(UnusablePackage, match="not a readable"):
        packages.find(str(tmp_path / "broken.tar.gz"))


def test_an_archive_stays_in_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("../outside.py"), io.BytesIO())
    with pytest.raises(UnusablePackage, match="not a readable"):
        packages.find(str(archive))
    assert not (tmp_path.parent / "outside.py").exists()


def test_a_damaged_line_is_named_and_the_others_load(tally: Tally, tmp_path: Path) -> None:
    factory.save(tally.package, tally.made.bugs[:3], tmp_path / "tasks")
    file = tmp_path / "tasks" / "tasks.jsonl"
    lines = file.read_text().splitlines()
    broken = json.loads(lines[1])
    broken["mutations"][0][1]["edit"]["end"] = 10**6
    file.write_text("\n".join([lines[0], json.dumps(broken), "{", *lines[2:]]))
    loaded = load_tasks(f"factory:{tmp_path / 'tasks'}")
    assert len(loaded.tasks) == 2
    assert [problem.where.rpartition(":")[2] for problem in loaded.problems] == ["2", "3"]
    with pytest.raises(FileExistsError, match="name a new folder"):
        factory.save(tally.package, [], tmp_path / "tasks")


def test_the_command_makes_a_folder_of_tasks(tally: Tally, tmp_path: Path) -> None:
    command = ["tasks", "make", str(tally.source), "--out", str(tmp_path / "tasks"), "-n", "1", "--seed", "3"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "1 tasks in" in done.output, done.output
    (task,) = load_tasks(f"factory:{tmp_path / 'tasks'}").tasks
    assert task.id != load_tasks(f"factory:{tally.folder}").tasks[0].id  # another seed
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "name a new folder" in again.output


@pytest.mark.skipif("ARGOSY_TEST_NETWORK" not in os.environ, reason="set ARGOSY_TEST_NETWORK to fetch a package by pip")
def test_a_package_by_name() -> None:
    package = packages.find("toolz")
    made = asyncio.run(factory.make(package, count=3))
    assert package.name == "toolz" and len(made.bugs) == 3
