import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from argosy.buffer import Trajectory
from argosy.learner import checkpoint, critic, policy
from argosy.learner.estimates import estimate
from argosy.learner.model import Critic, Policy
from argosy.learner.optimization import Trainee
from argosy.learner.packing import Batch, flatten
from argosy.learner.settings import LearnerSettings, ObjectiveSettings, OptimizerSettings, StopSettings

SETTINGS = LearnerSettings(stop=StopSettings(steps=1), objective=ObjectiveSettings(low=1.0, high=1e6))


def build(model_dir: Path) -> dict[str, Trainee]:
    fast = OptimizerSettings(lr=3e-3)
    return {"policy": Trainee(Policy(model_dir), fast), "critic": Trainee(Critic(model_dir), fast)}


def train(trainees: dict[str, Trainee], batch: Batch) -> None:
    judged = critic.learn(trainees["critic"], batch, SETTINGS, updates=1)
    learned = estimate(batch, judged.values, SETTINGS)
    assert policy.improve(trainees["policy"], batch, learned, SETTINGS).moved


def test_a_resumed_run_goes_on_bit_for_bit(
    model_dir: Path, tmp_path: Path, alone: None, episode: Callable[..., Trajectory]
) -> None:
    generator = np.random.default_rng(2)
    batches = [flatten([episode(generator, f"t{i}", reward=float(i % 2)) for i in range(6)]) for _ in range(4)]
    first = build(model_dir)
    for batch in batches[:2]:
        train(first, batch)
    checkpoint.save(tmp_path, 2, first, {"step": 2})
    second = build(model_dir)
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.load(found, second) == {"step": 2}
    for trainees in (first, second):
        for batch in batches[2:]:
            train(trainees, batch)
    for name in first:
        others = dict(second[name].model.named_parameters())
        assert all(torch.equal(p, others[key]) for key, p in first[name].model.named_parameters())


def test_only_whole_checkpoints_count_and_two_are_kept(model_dir: Path, tmp_path: Path, alone: None) -> None:
    assert checkpoint.newest(tmp_path) is None
    trainees = build(model_dir)
    for number in (5, 30, 100):
        checkpoint.save(tmp_path, number, trainees, {})
    (tmp_path / "checkpoints" / ".000200.unfinished").mkdir()
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "000100"
    assert sorted(path.name for path in newest.parent.iterdir()) == [".000200.unfinished", "000030", "000100"]
    assert multiprocessing.active_children() == []  # one would outlive a learner that is killed
