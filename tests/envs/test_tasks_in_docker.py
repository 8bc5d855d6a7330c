"""Coding tasks where their images are: on a real Docker engine."""

import json
from pathlib import Path
from typing import Any

from argosy.actors.tool_calls import parse
from argosy.envs import Sandbox, close_shared_pools
from argosy.envs.code import CodeEnv
from argosy.envs.grading import apply_solution, begin, grade
from argosy.envs.tasks.leaks import leaks
from argosy.envs.tasks.load import load_tasks

from .test_swebench import PATCH, SUBTRACT, row

TASKS = Path(__file__).parent / "tasks"
REPOSITORY = """\
FROM {image}
WORKDIR /testbed
COPY fix.patch /tmp/
RUN mkdir tests && touch tests/__init__.py && printf 'def add(x, y):\\n    return x + y\\n' >calc.py \\
 && printf 'import unittest\\n\\nimport calc\\nclass CalcTest(unittest.TestCase):\\n    def test_add(self):\\n' \\
    >tests/test_calc.py && echo '        self.assertEqual(calc.add(1, 2), 3)' >>tests/test_calc.py \\
 && git init -q && git config user.name a && git config user.email a@b && git add -A && git commit -qm base \\
 && git apply /tmp/fix.patch && git commit -qam fix && git tag later && git reset -q --hard HEAD~1 && rm /tmp/fix.patch
"""


def test_the_expert_solves_an_exercise(docker_image: str, run: Any) -> None:
    async def episode() -> None:
        env = CodeEnv(f"directory:{TASKS / 'quixbugs'}", backend="docker", image=docker_image)
        await env.start(0)
        expert = env.expert(None)  # type: ignore[arg-type]
        step = None
        while step is None or not step.done:
            content, calls, error = parse(expert([]))
            step = await env.act(calls, content, error)
        assert (await env.score()).reward == 1.0
        await env.stop()
        await close_shared_pools()

    run(episode())


def test_a_row_with_an_image_is_sound_and_its_later_commits_are_gone(
    docker_image: str, tmp_path: Path, run: Any
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    (image / "fix.patch").write_text(PATCH)
    (image / "Dockerfile").write_text(REPOSITORY.format(image=docker_image))
    config = {"test_cmd": "python3 -m unittest -v"}
    found = row(repo="a/b", docker_image=str(image), install_config=config, FAIL_TO_PASS=[SUBTRACT])
    (tmp_path / "rows.jsonl").write_text(json.dumps(found))

    async def judged() -> tuple[list[str], str, float]:
        (task,) = load_tasks(f"swebench:{tmp_path / 'rows.jsonl'}").tasks
        (stage,) = task.stages
        sandbox = await Sandbox.open(task.sandbox)
        try:
            await begin(task, stage, sandbox)
            readable = await leaks(task, sandbox)
            commits = await sandbox.exec("git log --all --format=%s")
            await apply_solution(stage, sandbox)
            return readable, commits.output, (await grade(task, stage, sandbox)).reward
        finally:
            await sandbox.close()

    assert run(judged()) == ([], "task\n", 1.0)
