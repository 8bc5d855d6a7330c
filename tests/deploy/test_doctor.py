"""`argosy doctor mismatch`: on a real engine and learner, and what it concludes from which numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from argosy.deploy.doctor import verdict

AGREE: dict[str, Any] = {
    "quantiles": {"1.0": 1e-5},
    "mismatch_k3": 1e-12,
    "episode_ratio": {"0.01": 1.0, "0.5": 1.0, "0.99": 1.0},
    "touched": {"icepop": 0.0, "dis": 0.0, "sequence-mask": 0.0, "gspo, old: engine": 0.0},
}


@pytest.mark.parametrize(
    ("changes", "conclusion"),
    [
        ({}, "agree to 1e-05 nats"),
        ({"quantiles": {"1.0": 0.05}, "mismatch_k3": 1e-5}, "evens out over an episode"),
        (
            {"quantiles": {"1.0": 0.3}, "episode_ratio": {"0.01": 0.7, "0.5": 1.0, "0.99": 1.5}},
            "adds up over an episode: its probability is off by a factor of 0.7 to 1.5",
        ),
        ({"quantiles": {"1.0": 3.0}, "touched": AGREE["touched"] | {"icepop": 0.03}}, "Find the cause before training"),
    ],
)
def test_the_verdict(changes: dict[str, Any], conclusion: str) -> None:
    assert conclusion in verdict(AGREE | changes)


@pytest.mark.timeout(300)
def test_the_same_weights_say_the_same_on_both_sides(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "argosy.deploy.cli", "doctor", "mismatch", "demo", "name=ill", "--episodes", "24"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "Engine and learner agree" in " ".join(ended.stdout.split())
    found = json.loads((tmp_path / "runs" / "ill-doctor" / "mismatch.json").read_text())
    assert found["episodes"] == 24 and found["tokens"] > 100
    assert found["quantiles"]["1.0"] < 1e-4
    assert not (tmp_path / "runs" / "ill").exists()
