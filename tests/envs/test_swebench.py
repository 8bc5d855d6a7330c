"""Rows of the SWE-bench family."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import close_shared_pools
from argosy.envs.tasks import NamedTests, Task, TestOutcomes
from argosy.envs.tasks.load import Loaded, load_tasks
from argosy.envs.tasks.validation import Check, validate_tasks

TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -4,3 +4,6 @@
 class CalcTest(unittest.TestCase):
     def test_add(self):
         self.assertEqual(calc.add(1, 2), 3)
+
+    def test_subtract(self):
+        self.assertEqual(calc.subtract(3, 1), 2)
"""
PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,6 @@
 def add(x, y):
     return x + y
+
+
+def subtract(x, y):
+    return x - y
"""
BUG = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(x, y):
-    return x + y
+    return x - y - x
"""
ADD, SUBTRACT = (f"test_{name} (tests.test_calc.CalcTest.test_{name})" for name in ("add", "subtract"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A clone whose later commit has the fix, and the commit before."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").write_text("")
    (folder / "calc.py").write_text("def add(x, y):\n    return x + y\n")
    test = "import unittest\n\nimport calc\nclass CalcTest(unittest.TestCase):\n    def test_add(self):\n"
    (folder / "tests" / "test_calc.py").write_text(test + "        self.assertEqual(calc.add(1, 2), 3)\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("calc.py")

    def git(*arguments: str, stdin: str = "") -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(folder), *who, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "base")
    base = git("rev-parse", "HEAD")
    git("apply", "-", stdin=PATCH)
    git("commit", "-qam", "fix")
    return folder, base


def load(folder: Path, *rows: Any, name: str = "rows.jsonl", **options: Any) -> Loaded:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) if name.endswith("l") else f"[{','.join(lines)}]")
    return load_tasks(f"swebench:{folder / name}", **options)


def row(**changes: Any) -> dict[str, Any]:
    found = {
        "instance_id": "django__django-1",
        "repo": "django/django",
        "base_commit": "abc",
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "problem_statement": "Add subtract.",
        "FAIL_TO_PASS": json.dumps([SUBTRACT]),
        "PASS_TO_PASS": [ADD],
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


def only(loaded: Loaded) -> Task:
    assert not loaded.problems, loaded.problems
    (task,) = loaded.tasks
    return task


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_swe_bench(tmp_path: Path, name: str) -> None:
    task = only(load(tmp_path, row(), name=name))
    (stage,) = task.stages
    assert task.sandbox.image == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert (
        task.sandbox.backend == "docker" and task.sandbox.workdir == "/testbed" and "Add subtract." in stage.instruction
    )
    assert stage.grading.verdict == NamedTests((SUBTRACT,), (ADD,), "unittest")
    assert "--parallel 1 test_calc;" in stage.grading.command and stage.grading.protected == ("tests/test_calc.py",)
    seen = json.dumps([task.setup, stage.instruction, *(f.decode() for f in stage.files.values())])
    assert "test_subtract" not in seen and "return x - y" not in seen


def test_swe_gym_and_rebench_images(tmp_path: Path) -> None:
    gym = only(load(tmp_path, row(instance_id="getmoto__moto-7", repo="getmoto/moto")))
    assert gym.sandbox.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7:latest"
    assert "pytest -rA" in gym.stages[0].grading.command
    config = {"test_cmd": "pytest --no-header -rA", "log_parser": "parse_log_pytest"}
    first = only(load(tmp_path, row(repo="a/b", docker_image="swerebench/x:1", install_config=config)))
    assert first.sandbox.image == "swerebench/x:1" and first.sandbox.workdir == "/testbed"
    assert "pytest --no-header -rA tests/test_calc.py" in first.stages[0].grading.command
    second = config | {"test_cmd": ["pip install -e .", "pytest -rA"], "base_image_name": "python"}
    task = only(load(tmp_path, row(repo="a/b", image_name="y:2", install_config=second)))
    assert task.sandbox.image == "y:2" and task.sandbox.workdir == "/b"
    assert "pip install -e . && pytest -rA" in task.stages[0].grading.command


def test_the_patch_of_swe_smith_makes_the_bug(tmp_path: Path) -> None:
    smith = row(
        repo="swesmith/a__b.1", image_name="swebench/swesmith.x86_64.a_1776_b.1", test_patch=None, base_commit=None
    )
    task = only(load(tmp_path, smith | {"FAIL_TO_PASS": ["tests/test_a.py::test_x"], "PASS_TO_PASS": []}))
    (stage,) = task.stages
    (bug,) = stage.files
    assert stage.files[bug].decode() == PATCH and f"{bug} ||" in task.setup and "rm -r" in task.setup
    assert stage.solution and "-R" in stage.solution.command
    assert "pytest -rA --color=no -p no:cacheprovider tests/test_a.py" in stage.grading.command


def test_r2e_wants_every_outcome(tmp_path: Path) -> None:
    diff = {"header": {"file": {"path": "src/a.py"}}, "new_file_content": "fixed = 1\n"}
    r2e = {
        "repo_name": "orange3",
        "docker_image": "namanjain12/orange3_final:abc",
        "commit_hash": "abcdef0123456789",
        "problem_statement": "It is broken.",
        "expected_output_json": json.dumps({"TestA.test_b": "PASSED", "test_c": "FAILED"}),
        "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": ["assert 1"]}),
        "parsed_commit_content": json.dumps({"file_diffs": [diff, diff | {"header": {"file": {"path": "test_a.py"}}}]}),
    }
    task = only(load(tmp_path, r2e))
    (stage,) = task.stages
    assert task.id == "orange3/abcdef012345" and "rm -rf /r2e_tests" in task.setup
    assert stage.grading.verdict == TestOutcomes({"TestA.test_b": "PASSED", "test_c": "FAILED"})
    assert set(stage.grading.files) == {"r2e_tests/test_1.py"}
    assert stage.solution and stage.solution.files == {"src/a.py": b"fixed = 1\n"}


@pytest.mark.parametrize(
    "changes, field, message",
    [
        ({"FAIL_TO_PASS": "[not json"}, "FAIL_TO_PASS", "written as JSON"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS", "nothing to solve"),
        ({"PASS_TO_PASS": {"a": 1}}, "PASS_TO_PASS", "list of texts"),
        ({"problem_statement": None}, "problem_statement", "missing"),
        ({"test_patch": ""}, "test_patch", "changes no file"),
        ({"repo": "sympy/sympy"}, "repo", "report of its own"),
        ({"repo": "a/b", "install_config": {"test_cmd": "cargo test"}}, "install_config.test_cmd", "neither pytest"),
        ({"expected_output_json": "{}"}, "docker_image", "missing"),
    ],
)
def test_a_malformed_row_names_line_and_field_and_the_rest_loads(
    tmp_path: Path, changes: dict[str, Any], field: str, message: str
) -> None:
    loaded = load(tmp_path, row(), row(**changes), "{", row(instance_id="django__django-2"), row())
    assert [task.id for task in loaded.tasks] == ["django__django-1", "django__django-2"]
    problem, no_json, twice = loaded.problems
    assert problem.where == f"{tmp_path / 'rows.jsonl'}:2" and problem.field == field and message in problem.message
    assert no_json.where.endswith(":3") and "not JSON" in no_json.message
    assert twice.where.endswith(":5") and twice.field == "id"


def local(base: str, repo: str = "a/b", tests: str = "", **changes: Any) -> dict[str, Any]:
    config = {"test_cmd": f"python3 -m unittest -v {tests}".strip()}
    return row(repo=repo, base_commit=base, install_config=config, **changes)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_local_repository_gives_one_commit_and_no_patch(tmp_path: Path, repository: tuple[Path, str]) -> None:
    folder, base = repository
    before = contents(folder)
    task = only(load(tmp_path, local(base), repository=str(folder)))
    (stage,) = task.stages
    assert task.sandbox.backend == "bubblewrap"
    assert set(stage.files) == {"calc.py", "run.sh", "tests/__init__.py", "tests/test_calc.py"}
    assert b"subtract" not in b"".join(stage.files.values())
    assert b"test_subtract" in stage.grading.files["tests/test_calc.py"]
    assert stage.solution and b"return x - y" in stage.solution.files["calc.py"]
    assert "chmod +x run.sh" in task.setup and "ln -sfn calc.py link" in task.setup
    assert contents(folder) == before


def test_rows_of_a_local_repository_are_sound(tmp_path: Path, repository: tuple[Path, str], run: Any) -> None:
    folder, base = repository
    smith = local(base, "swesmith/b", "tests.test_calc", instance_id="smith", test_patch=None, patch=BUG)
    smith |= {"FAIL_TO_PASS": [ADD], "PASS_TO_PASS": []}
    loaded = load(tmp_path, local(base), smith, repository=str(folder))

    async def validate() -> list[Check]:
        found = [check async for check in validate_tasks(loaded)]
        await close_shared_pools()
        return found

    assert run(validate()) == [Check("django__django-1"), Check("smith")]


def test_a_local_repository_that_does_not_fit(tmp_path: Path, repository: tuple[Path, str]) -> None:
    folder, base = repository
    (problem,) = load(tmp_path, local("f" * 40), repository=str(folder)).problems
    assert problem.field == "base_commit" and "f" * 40 in problem.message
    (problem,) = load(tmp_path, local(base, patch=PATCH.replace("add(", "sum(")), repository=str(folder)).problems
    assert problem.field == "base_commit" and "patch does not apply" in problem.message
    (problem,) = load(tmp_path, local(base), repository=str(tmp_path)).problems
    assert "no repository" in problem.message
