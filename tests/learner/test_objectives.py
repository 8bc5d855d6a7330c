"""Against the formulas in NumPy float64, gradients included."""

import numpy as np
import pytest
import torch
from argosy.learner.objectives import dis, ppo, staleness_weight, value_loss

LOW, HIGH = 0.5, 3.0


def case(size: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    behaviour = -3 * generator.random(size)
    theta = behaviour + generator.normal(size=size)
    return theta, behaviour, generator.normal(size=size)


def evaluate(objective: object, theta: np.ndarray, other: np.ndarray, advantage: np.ndarray) -> tuple[np.ndarray, ...]:
    leaf = torch.tensor(theta, requires_grad=True)
    loss, kept = objective(leaf, torch.tensor(other), torch.tensor(advantage), LOW, HIGH)  # type: ignore[operator]
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach().numpy(), leaf.grad.numpy(), kept.numpy()


def test_dis_masks_both_sides_and_weighs_by_the_ratio() -> None:
    theta, mu, advantage = case()
    loss, gradient, kept = evaluate(dis, theta, mu, advantage)
    ratio = np.exp(theta - mu)
    inside = (ratio > 1 - LOW) & (ratio < 1 + HIGH)
    assert 0 < inside.sum() < len(inside) and np.array_equal(kept, inside)
    assert np.allclose(loss, -np.where(inside, ratio, 0) * advantage * theta)
    assert np.allclose(gradient, -np.where(inside, ratio, 0) * advantage)


def test_ppo_takes_the_pessimistic_side() -> None:
    theta, old, advantage = case()
    loss, gradient, kept = evaluate(ppo, theta, old, advantage)
    ratio = np.exp(theta - old)
    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage
    assert np.allclose(loss, -np.minimum(ratio * advantage, clipped))
    active = ratio * advantage <= clipped
    assert np.array_equal(kept, active) and not active.all()
    assert np.allclose(gradient, np.where(active, -ratio * advantage, 0))


@pytest.mark.parametrize("gap", [-1e4, -200.0, 200.0, 1e4])
def test_a_ratio_beyond_float_range_pushes_nowhere(gap: float) -> None:
    loss, gradient, kept = evaluate(dis, np.array([gap]), np.array([0.0]), np.array([1.0]))
    assert loss[0] == gradient[0] == 0 and not kept[0]


def test_the_edges_of_the_range_are_outside() -> None:
    theta = np.log(np.array([1 - LOW, 1 + HIGH]))
    assert not evaluate(dis, theta, np.zeros(2), np.ones(2))[2].any()


def test_weights_and_value_loss() -> None:
    old, mu, returns = case()
    weight = staleness_weight(torch.tensor(old), torch.tensor(mu)).numpy()
    assert np.allclose(weight, np.minimum(np.exp(old - mu), 2.0))
    assert np.allclose(value_loss(torch.tensor(old), torch.tensor(returns)).numpy(), 0.5 * (old - returns) ** 2)
