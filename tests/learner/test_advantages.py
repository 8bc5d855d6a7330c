"""Against the definitions written as loops in float64."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from argosy.buffer import Trajectory
from argosy.learner.advantages import gae
from argosy.learner.estimates import MIN_SPREAD, estimate, targets
from argosy.learner.packing import flatten
from argosy.learner.settings import LearnerSettings


def judging(**advantage: object) -> LearnerSettings:
    return LearnerSettings(stop={"steps": 1}, advantage=advantage)


def by_definition(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """A_k = sum_j (gamma lambda)^j delta_{k+j}, straight from the paper."""
    following = [*values, bootstrap][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:])) for k in range(len(values))]


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0, "each"])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_on_ragged_episodes(gamma: float, lam: float | str) -> None:
    generator = np.random.default_rng(1)
    lengths = [3, 0, 1, 17, 0, 40, 0]
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    rewards, values = generator.normal(size=(2, boundaries[-1]))
    bootstrap = generator.normal(size=len(lengths)) * (generator.random(len(lengths)) < 0.5)
    lambdas = generator.random(len(lengths)) if lam == "each" else np.full(len(lengths), lam, np.float64)
    got = gae(rewards, values, bootstrap, boundaries, gamma=gamma, lam=lambdas if lam == "each" else float(lambdas[0]))
    expected = [
        advantage
        for e, (a, b) in enumerate(pairwise(boundaries))
        for advantage in by_definition(rewards[a:b].tolist(), values[a:b].tolist(), bootstrap[e], gamma, lambdas[e])
    ]
    assert np.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_gae_of_nothing_is_nothing() -> None:
    assert gae(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(1, np.int64)).shape == (0,)


@pytest.mark.parametrize(("status", "by_limit", "continues"), [
    ("terminated", True, False), ("truncated", True, True), ("truncated", False, False), ("segment", False, True),
])  # fmt: skip
def test_what_follows_the_last_action(
    status: str, by_limit: bool, continues: bool, alone: None, episode: Callable[..., Trajectory]
) -> None:
    generator = np.random.default_rng(0)
    trajectory = episode(generator, status=status, reward=0.25)
    windows = [*trajectory.traces, *episode(generator).traces]  # a second context window
    batch = flatten([replace(trajectory, traces=windows)])
    values = generator.normal(size=len(batch.tokens)).astype(np.float32)
    settings = judging(gamma=0.99, lambda_policy=0.9, lambda_critic=0.8, bootstrap_truncated=by_limit)
    learned = estimate(batch, values, settings)
    rewards = [0.0] * (len(batch.actions) - 1) + [0.25]
    at_actions = values[batch.actions].astype(np.float64).tolist()
    follows = float(values[-1]) if continues else 0.0
    policy = by_definition(rewards, at_actions, follows, 0.99, 0.9)
    critic = np.add(by_definition(rewards, at_actions, follows, 0.99, 0.8), at_actions)
    assert np.allclose(learned.advantages, policy, atol=1e-5) and np.allclose(learned.returns, critic, atol=1e-5)


def test_lambda_adapts_to_the_length_and_critic_targets_are_returns(
    alone: None, episode: Callable[..., Trajectory]
) -> None:
    generator = np.random.default_rng(0)
    batch = flatten([episode(generator, f"t{i}", length=n, reward=1.0) for i, n in enumerate([20, 90])])
    values = generator.normal(size=len(batch.tokens)).astype(np.float32)
    learned = estimate(batch, values, judging())
    for a, b in pairwise(batch.boundaries):
        rewards, at_actions = [0.0] * (b - a - 1) + [1.0], values[batch.actions[a:b]].astype(np.float64).tolist()
        expected = by_definition(rewards, at_actions, 0.0, 1.0, 1 - 1 / (1.5 * (b - a)))
        assert np.allclose(learned.advantages[a:b], expected, atol=1e-5)
    assert np.allclose(learned.returns, 1.0, atol=1e-6)
    assert np.allclose(targets(batch, np.zeros_like(values), judging()), 1.0)


def test_whitening_takes_the_moments_of_the_batch_and_leaves_noise_alone(
    alone: None, episode: Callable[..., Trajectory]
) -> None:
    generator = np.random.default_rng(0)
    batch = flatten([episode(generator, f"t{i}", reward=float(i % 2)) for i in range(6)])
    zeros = np.zeros(len(batch.tokens), np.float32)
    plain = estimate(batch, zeros, judging(lambda_policy=1.0))
    white = estimate(batch, zeros, judging(lambda_policy=1.0, whiten=True))
    assert abs(white.advantages.mean()) < 1e-6 and abs(white.advantages.std() - 1) < 1e-5
    assert white.spread == plain.spread == pytest.approx(plain.advantages.std()) and plain.carries_signal

    same = flatten([replace(trajectory, reward=1.0) for trajectory in batch.trajectories])
    noise = generator.normal(size=len(zeros)).astype(np.float32) * MIN_SPREAD / 10
    flat = estimate(same, noise, judging(lambda_policy=1.0, whiten=True))
    assert not flat.carries_signal
    assert np.allclose(flat.advantages, 1.0, atol=MIN_SPREAD)  # not divided by a tiny number
