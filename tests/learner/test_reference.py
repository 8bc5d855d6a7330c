"""The frozen policy: written once, the same for ever, and what leaving it costs."""

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from argosy.buffer import Trajectory
from argosy.learner import policy
from argosy.learner.estimates import estimate
from argosy.learner.model import Policy
from argosy.learner.optimization import Trainee
from argosy.learner.packing import Batch, flatten
from argosy.learner.reference import Reference, penalise
from argosy.learner.settings import LearnerSettings, OptimizerSettings


def settings(**objective: Any) -> LearnerSettings:
    wide = {"low": 1.0, "high": 1e6, **objective}
    return LearnerSettings(stop={"steps": 1}, objective=wide, per_source={"other": {"objective": {}}})


@pytest.fixture
def batch(episode: Callable[..., Trajectory]) -> Batch:
    generator = np.random.default_rng(7)
    made = [episode(generator, f"t{i}", reward=float(i % 2)) for i in range(6)]
    return flatten([replace(t, task=replace(t.task, source="other")) if i > 3 else t for i, t in enumerate(made)])


def test_it_stays_while_the_policy_moves_and_holds_it_back(
    model_dir: Path, tmp_path: Path, alone: None, batch: Batch
) -> None:
    values, apart = np.zeros(len(batch.tokens), np.float32), []
    for place, weight in enumerate((1e-6, 10.0)):
        chosen = settings(kl={"weight": weight})
        trainee = Trainee(Policy(model_dir), OptimizerSettings(lr=3e-3))
        run_dir = tmp_path / str(place)
        run_dir.mkdir()
        run: Any = types.SimpleNamespace(
            settings=chosen, policy=trainee, config=types.SimpleNamespace(run_dir=run_dir, model=model_dir)
        )
        begun, first = policy.look(trainee, batch, chosen), Reference(run).look(batch)
        assert first is not None and np.allclose(first, begun, atol=1e-6)
        for _ in range(8):
            step = policy.improve(trainee, batch, estimate(batch, values, chosen), chosen, first)
        assert step.diagnostics["reference_kl"] > 0
        resumed = Reference(run).look(batch)
        assert np.array_equal(resumed, first) and not np.allclose(policy.look(trainee, batch, chosen), begun, atol=0.1)
        own = batch.sequence < 4
        apart.append(np.abs(policy.look(trainee, batch, chosen) - begun)[own].mean())
    assert apart[1] < 0.5 * apart[0]


def test_without_a_penalty_there_is_none(model_dir: Path, tmp_path: Path, alone: None, batch: Batch) -> None:
    run: Any = types.SimpleNamespace(settings=settings(), config=types.SimpleNamespace(run_dir=tmp_path))
    assert Reference(run).look(batch) is None and not list(tmp_path.iterdir())
    assert penalise(batch, None, settings()) is batch


def test_in_the_reward_it_is_taken_off_what_each_action_earned(alone: None, batch: Batch) -> None:
    chosen = settings(kl={"weight": 0.5, "estimator": "k1", "place": "reward"})
    reference = batch.mu + np.random.default_rng(0).normal(size=len(batch.mu)).astype(np.float32)
    paid = penalise(batch, reference, chosen)
    own = batch.sequence < 4
    expected = batch.rewards - np.where(own, 0.5 * (batch.mu.astype(np.float64) - reference), 0)
    assert np.allclose(paid.rewards, expected, atol=1e-6)
    values = np.zeros(len(batch.tokens), np.float32)
    flat = settings().model_copy(update={"advantage": chosen.advantage.model_copy(update={"lambda_policy": 1.0})})
    learned = estimate(paid, values, flat)
    for index in range(len(batch.trajectories)):
        a, b = batch.boundaries[index : index + 2]
        assert np.allclose(learned.advantages[a:b], expected[a:b][::-1].cumsum()[::-1], atol=1e-4)


def test_against_the_group_it_is_taken_off_what_an_attempt_earned(alone: None, batch: Batch) -> None:
    grouped = [replace(t, group="0", attempt=f"0/{i}") for i, t in enumerate(batch.trajectories)]
    chosen = LearnerSettings(
        stop={"steps": 1},
        advantage={"name": "dr-grpo"},
        objective={"kl": {"weight": 0.5, "estimator": "k1", "place": "reward"}},
    )
    whole = flatten(grouped)
    paid = penalise(whole, whole.mu - 0.1, chosen)
    learned = estimate(paid, np.zeros(len(whole.tokens), np.float32), chosen)
    scores = np.array([t.reward for t in grouped]) - 0.05 * whole.lengths
    assert np.allclose(learned.advantages, (scores - scores.mean())[whole.sequence], atol=1e-5)
