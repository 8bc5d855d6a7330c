"""The examples are short, sound, named by their recipes, and one of them is really installed."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml
from argosy.actors.tool_calls import parse
from argosy.envs import TextGame, ToolEnv, make_env, tool
from argosy.envs.check import check

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENTS = {
    "frozen_lake": "frozen_lake/frozen_lake.py",
    "meetings": "meetings/meetings.py",
    "regexes": "regexes/argosy_regexes/env.py",
}


def argosy(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "argosy.deploy.cli", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd="/", env=env)


def test_each_is_short_and_listed() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/recipe.yaml")}
    assert folders == set(ENVIRONMENTS)
    for name, file in ENVIRONMENTS.items():
        lines = [line for line in (EXAMPLES / file).read_text().splitlines() if line.strip()]
        assert len(lines) < 60, f"{file} has {len(lines)} lines"
        assert f"[{name}/]({name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", ["frozen_lake", "regexes"])
def test_it_is_fit_for_training(name: str) -> None:
    report = check(str(EXAMPLES / ENVIRONMENTS[name]), seeds=2, parse="argosy.actors.tool_calls:parse")
    assert not [finding for finding in report.findings if finding.status == "fail"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_its_expert_earns_something(name: str, run: Any) -> None:
    async def play(env: ToolEnv, seed: int) -> float:
        messages = await env.start(seed)
        say = env.expert(random.Random(seed))
        done = False
        while not done:
            content, calls, error = parse(say(messages))
            step = await env.act(calls, content, error)
            messages, done = messages + step.messages, step.done
        grade = await env.score()
        await env.stop()
        return grade.reward

    env = make_env(str(EXAMPLES / ENVIRONMENTS[name]))
    assert sum(run(play(env, seed)) for seed in range(2)) >= 1


def test_recipes_find_the_file_beside_them() -> None:
    shown = argosy("config", str(EXAMPLES / "frozen_lake" / "recipe.yaml"))
    assert shown.returncode == 0, shown.stderr
    assert f"{EXAMPLES}/frozen_lake/frozen_lake.py:FrozenLake" in shown.stdout
    meetings = yaml.safe_load((EXAMPLES / "meetings" / "recipe.yaml").read_text())
    assert meetings["tasks"][0]["env"] == "./meetings.py:Meetings"


def test_an_installed_package_registers_its_environments(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLES / "regexes", source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=100)
    shown = argosy("envs", "list", PYTHONPATH=str(site))
    assert "regexes/easy" in shown.stdout and "regexes/hard" in shown.stdout, shown.stderr
    recipe = argosy("config", str(EXAMPLES / "regexes" / "recipe.yaml"), PYTHONPATH=str(site))
    assert recipe.returncode == 0 and "regexes/easy" in recipe.stdout, recipe.stderr
    (site / "argosy_regexes" / "__init__.py").write_text("register_all = 1 / 0")
    broken = argosy("envs", "list", PYTHONPATH=str(site))
    assert broken.returncode == 0 and "argosy/repair" in broken.stdout
    assert "argosy-regexes cannot register its environments" in broken.stderr and "ZeroDivisionError" in broken.stderr


class Cards(TextGame):
    """A game without a picture: what the model reads is the class's own text."""

    game = "Blackjack-v1"

    @tool
    def hit(self) -> str:
        """Take a card."""
        return self.play(1)

    @tool
    def stick(self) -> str:
        """Take none."""
        return self.play(0)

    def show(self, observation: Any) -> str:
        mine, theirs, ace = observation
        return f"you {mine}, dealer {theirs}" + (", an ace" if ace else "")


class Taxi(TextGame):
    game = "Taxi-v3" if "Taxi-v3" in gymnasium.registry else "Taxi-v4"

    @tool
    def drive(self, action: int) -> str:
        """Drive."""
        return self.play(action)


def test_other_games_of_gymnasium() -> None:
    cards = Cards()
    assert cards.reset(seed=1)[0].startswith("you ")
    text, reward, terminated, _, _ = cards.step('{"name": "stick", "arguments": {}}')
    assert terminated and reward in (-1.0, 0.0, 1.0) and text.startswith("you ")
    with pytest.raises(RuntimeError, match="the episode is over"):
        cards.step('{"name": "hit", "arguments": {}}')
    cards.close()
    taxi = Taxi()
    picture, _ = taxi.reset(seed=1)
    assert picture.startswith("+-") and "[" in picture and "\x1b" not in picture
    assert taxi.step('{"name": "drive", "arguments": {"action": 0}}')[1] == 0.0, "its -1 is in the grade"
    taxi.close()
