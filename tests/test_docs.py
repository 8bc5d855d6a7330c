"""What the documents show works as shown."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"```(\w+)\n(.*?)```", re.S)


def blocks(document: str, language: str) -> list[str]:
    return [text for kind, text in CODE.findall((ROOT / document).read_text()) if kind == language]


def test_the_environment_in_the_documents_runs(tmp_path: Path) -> None:
    environment, by_hand, *others = blocks("docs/environments.md", "python")
    elsewhere = textwrap.dedent(next(block for block in others if "replay" in block))
    assert len(environment.splitlines()) < 60
    (tmp_path / "guess.py").write_text(environment)
    check = "from gymnasium.utils.env_checker import check_env\nfrom guess import Guess\n"
    check += "check_env(Guess(), skip_render_check=True)"
    for script in (by_hand, elsewhere, check):
        ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
    command = [sys.executable, "-m", "argosy.deploy.cli", "envs", "check", "guess.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for shown in ("same seed, same episode", "begin alike", "random 0"):
        assert shown in ended.stdout


def test_the_recipe_in_the_documents_is_valid(tmp_path: Path) -> None:
    environment, *_ = blocks("docs/environments.md", "python")
    (tmp_path / "guess.py").write_text(environment)
    (recipe,) = blocks("docs/environments.md", "yaml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "guess.yaml").write_text(recipe.replace("/models/Qwen3-0.6B", "model"))
    command = [sys.executable, "-m", "argosy.deploy.cli", "config", "guess.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": "."})
    assert ended.returncode == 0, ended.stderr
    assert f"{tmp_path}/guess.py:Guess" in ended.stdout


def test_the_recipe_and_the_objective_about_learning_are_valid(tmp_path: Path) -> None:
    (objective,), (recipe,) = blocks("docs/algorithms.md", "python"), blocks("docs/algorithms.md", "yaml")
    (tmp_path / "mine.py").write_text(objective)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "both.yaml").write_text(recipe.replace("/models/Qwen3-0.6B", "model"))
    own = ["learner.objective={name: 'mine:bounded', parameters: {most: 3}}", "learner.correction={}"]
    for overrides in ([], own):
        command = [sys.executable, "-m", "argosy.deploy.cli", "config", "both.yaml", *overrides]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": "."}
        )
        assert ended.returncode == 0, ended.stderr
        assert ("mine:bounded" in ended.stdout) == bool(overrides)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/environments.md",
        "docs/algorithms.md",
        "examples/README.md",
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("https://"):
            assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"
    for folder in re.findall(r"`(\w+/)`", text):
        assert (ROOT / folder).is_dir() or folder == "runs/", f"{document}: {folder}"
