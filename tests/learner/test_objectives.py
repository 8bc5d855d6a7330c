"""Against the papers' formulas, written as loops in float64; gradients against finite differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from argosy.learner.aggregation import sequence_mean
from argosy.learner.methods import losses
from argosy.learner.objectives import k1, k2, k3, value_loss
from argosy.learner.settings import LearnerSettings, Method

LENGTHS = [3, 0, 1, 17, 5, 0, 40]


def method(objective: str, correction: str = "off", **parameters: Any) -> Method:
    advantage = {"name": "grpo"} if objective == "gspo" else {}
    return LearnerSettings(
        stop={"steps": 1},
        objective={"name": objective, **parameters},
        correction={"name": correction},
        advantage=advantage,
    ).method(None)


class Case:
    """Episodes of LENGTHS actions, laid out one after another."""

    def __init__(self, seed: int = 0, drift: float = 0.4, lengths: list[int] = LENGTHS, per_token: bool = True):
        generator = np.random.default_rng(seed)
        self.sequence = np.repeat(np.arange(len(lengths)), lengths)
        size = len(self.sequence)
        self.mu = -3 * generator.random(size)
        self.old = self.mu + 0.3 * generator.normal(size=size)
        self.theta = self.old + drift * generator.normal(size=size)
        advantage = generator.normal(size=len(lengths))[self.sequence]
        self.advantage = advantage * (generator.random(size) + 0.5) if per_token else advantage

    def columns(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        found = {
            "mu": self.mu, "old": self.old, "theta": self.theta, "advantage": self.advantage,
            "drift": sequence_mean(self.theta - self.old, self.sequence),
            "mismatch": sequence_mean(self.old - self.mu, self.sequence),
            "length": np.bincount(self.sequence)[self.sequence], "entropy": np.zeros(len(self.mu)),
        }  # fmt: skip
        tensors = {name: torch.tensor(column, dtype=dtype) for name, column in found.items()}
        tensors["theta"].requires_grad_()
        return tensors


def evaluate(chosen: Method, columns: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> loss, its gradient by theta, kept."""
    loss, kept, _ = losses([chosen], columns)
    loss.sum().backward()
    gradient = columns["theta"].grad
    assert gradient is not None
    return loss.detach().numpy(), gradient.numpy(), kept.numpy()


# The formulas: a loss per action of theta and of the theta at which what is under a stop-gradient is held.
Formula = Callable[..., list[float]]


def ppo(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float, dual: float | None = None) -> Any:
    found = []
    for t, old, a in zip(theta, case.old, case.advantage, strict=True):
        r = math.exp(t - old)
        surrogate = min(r * a, min(max(r, 1 - low), 1 + high) * a)
        found.append(-(max(surrogate, dual * a) if dual is not None and a < 0 else surrogate))
    return found


def decoupled(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float) -> Any:
    behind = [math.exp(old - mu) for old, mu in zip(case.old, case.mu, strict=True)]
    return [weight * loss for weight, loss in zip(behind, ppo(case, theta, held, low, high), strict=True)]


def dis(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float) -> Any:
    found = []
    for t, at, mu, a in zip(theta, held, case.mu, case.advantage, strict=True):
        ratio = math.exp(at - mu)
        found.append(-(ratio if 1 - low < ratio < 1 + high else 0.0) * a * t)
    return found


def cispo(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float) -> Any:
    found = []
    for t, at, old, a in zip(theta, held, case.old, case.advantage, strict=True):
        found.append(-min(max(math.exp(at - old), 1 - low), 1 + high) * a * t)
    return found


def gspo(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float) -> Any:
    """Every action of a sequence stands for the sequence's loss."""
    found = []
    for index in case.sequence:
        own = case.sequence == index
        s = math.exp(sum(theta[own] - case.old[own]) / own.sum())
        a = case.advantage[own][0]
        found.append(-min(s * a, min(max(s, 1 - low), 1 + high) * a))
    return found


def gspo_token(case: Case, theta: np.ndarray, held: np.ndarray, low: float, high: float) -> Any:
    found = []
    for place, index in enumerate(case.sequence):
        own = case.sequence == index
        s = math.exp(sum(held[own] - case.old[own]) / own.sum()) * math.exp(theta[place] - held[place])
        a = case.advantage[place]
        found.append(-min(s * a, min(max(s, 1 - low), 1 + high) * a))
    return found


FORMULAS: dict[str, tuple[Formula, dict[str, float]]] = {
    "ppo": (ppo, {"low": 0.2, "high": 0.28}),
    "grpo": (ppo, {"low": 0.2, "high": 0.2, "dual": 1.3}),
    "decoupled-ppo": (decoupled, {"low": 0.2, "high": 0.2}),
    "dis": (dis, {"low": 0.5, "high": 0.6}),
    "cispo": (cispo, {"low": 0.3, "high": 0.4}),
    "gspo": (gspo, {"low": 0.05, "high": 0.1}),
    "gspo-token": (gspo_token, {"low": 0.05, "high": 0.1}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    formula, parameters = FORMULAS[name]
    for seed in range(5):
        case = Case(seed, per_token=name != "gspo")
        loss, _, kept = evaluate(method(name, **parameters), case.columns())
        assert np.allclose(loss, formula(case, case.theta, case.theta, **parameters), rtol=1e-12)
        assert 0 < kept.sum() < len(kept)

        # Sequence by sequence, so that gspo's mean over a sequence is the loss that is differentiated.
        weight = 1 / np.bincount(case.sequence)[case.sequence]
        columns = case.columns()
        (losses([method(name, **parameters)], columns)[0] * torch.tensor(weight)).sum().backward()
        step, expected = 1e-6, np.zeros(len(case.theta))
        for place in range(len(case.theta)):
            moved = [case.theta.copy(), case.theta.copy()]
            moved[0][place] += step
            moved[1][place] -= step
            up, down = (np.dot(formula(case, theta, case.theta, **parameters), weight) for theta in moved)
            expected[place] = (up - down) / (2 * step)
        assert columns["theta"].grad is not None
        assert np.allclose(columns["theta"].grad.numpy(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", FORMULAS)
def test_what_leaves_its_range_upwards_with_a_gain_pushes_no_further(name: str) -> None:
    case = Case(drift=0.0, per_token=False)
    case.theta, case.mu, case.advantage = case.old + 5.0, case.old, np.abs(case.advantage)
    _, gradient, kept = evaluate(method(name), case.columns())
    assert not kept.any() and (gradient.any() == (name == "cispo"))  # which bounds the weight and keeps the gradient


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_it_is_the_policy_gradient(name: str) -> None:
    case = Case(per_token=False)
    case.old = case.theta = case.mu
    _, gradient, kept = evaluate(method(name), case.columns())
    assert kept.all() and np.allclose(gradient, -case.advantage, rtol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("lengths", [[1], [], [0, 0], [0, 1, 0]])
def test_one_action_or_none(name: str, lengths: list[int]) -> None:
    formula, parameters = FORMULAS[name]
    case = Case(lengths=lengths)
    loss, gradient, kept = evaluate(method(name, **parameters), case.columns())
    assert np.allclose(loss, formula(case, case.theta, case.theta, **parameters))
    assert gradient.shape == kept.shape == (sum(lengths),)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("gap", [-math.inf, -1e4, -200.0, -30.0, 30.0, 200.0, 1e4])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_ratio_beyond_float_range_stays_finite(name: str, gap: float, sign: float) -> None:
    """In float32, as in training: exp(200) is no number there, and 0 * inf in a backward pass is nan."""
    case = Case(lengths=[1])
    case.mu = case.old = np.array([-1.0])
    case.theta, case.advantage = np.array([gap]), np.array([sign])
    loss, gradient, kept = evaluate(method(name), case.columns(torch.float32))
    assert np.isfinite(loss).all() and np.isfinite(gradient).all()
    if gap < -100:  # an action that has become impossible cannot become more so
        assert not gradient.any()
    if name == "dis":
        assert loss[0] == gradient[0] == 0 and not kept[0]


@pytest.mark.parametrize("name", FORMULAS)
def test_an_action_that_was_impossible_is_no_reason_to_move_far(name: str) -> None:
    case = Case(lengths=[2], per_token=False)
    case.theta, case.advantage = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    case.old = case.mu = np.array([-math.inf, -1.0])
    columns = case.columns(torch.float32)
    columns["mismatch"] = torch.zeros(2)
    if name == "decoupled-ppo":  # old - mu is not a number here: both would have to be impossible
        columns["mu"] = torch.full((2,), -1.0)
    loss, gradient, kept = evaluate(method(name), columns)
    assert np.isfinite(loss).all() and np.isfinite(gradient).all() and not kept[0]
    assert np.abs(gradient).max() <= 5.0


def test_masked_everywhere_moves_nothing() -> None:
    case = Case()
    case.theta = case.mu + 3.0
    loss, gradient, kept = evaluate(method("dis"), case.columns())
    assert not loss.any() and not gradient.any() and not kept.any()


def test_the_edges_of_the_range_are_outside() -> None:
    case = Case(lengths=[2])
    case.theta, case.mu = np.log(np.array([1 - 0.5, 1 + 3.0])), np.zeros(2)
    assert not evaluate(method("dis", low=0.5, high=3.0), case.columns())[2].any()


def test_against_the_engine_the_old_policy_is_the_engine() -> None:
    case = Case()
    against_engine = evaluate(method("ppo", old="engine"), case.columns())
    case.old = case.mu
    for got, expected in zip(against_engine, evaluate(method("ppo"), case.columns()), strict=True):
        assert np.array_equal(got, expected)


def test_the_entropy_bonus_is_subtracted() -> None:
    columns = Case().columns()
    columns["entropy"] = torch.linspace(0, 1, len(columns["mu"]), dtype=torch.float64)
    plain, _, _ = losses([method("dis")], columns)
    assert torch.allclose(losses([method("dis", entropy=0.1)], columns)[0], plain - 0.1 * columns["entropy"])


def test_divergence_estimates() -> None:
    case = Case(drift=1.0)
    theta, reference = torch.tensor(case.theta), torch.tensor(case.old)
    gap = case.theta - case.old
    assert np.allclose(k1(theta, reference), gap)
    assert np.allclose(k2(theta, reference), gap**2 / 2)
    assert np.allclose(k3(theta, reference), np.exp(-gap) - 1 + gap)
    assert np.isfinite(k3(torch.tensor([-1e3]), torch.tensor([0.0])).numpy()).all()


def test_divergence_estimates_and_their_gradients_have_the_means_they_are_said_to_have() -> None:
    """Exactly, as sums over a vocabulary: of k1 and k3 the divergence; of k2's gradient the divergence's gradient."""
    generator = np.random.default_rng(0)
    logits, other = torch.tensor(generator.normal(size=(2, 7)))
    logits.requires_grad_()
    theta, reference = logits.log_softmax(-1), other.log_softmax(-1)
    p = theta.detach().exp()
    divergence = (theta.exp() * (theta - reference)).sum()
    assert torch.isclose((p * k1(theta, reference)).sum(), divergence)
    assert torch.isclose((p * k3(theta, reference)).sum(), divergence)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    back = (reference.exp() * (reference - theta)).sum()
    assert torch.allclose(gradient((p * k2(theta, reference)).sum()), gradient(divergence))
    assert torch.allclose(gradient((p * k1(theta, reference)).sum()), torch.zeros(7, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(gradient((p * k3(theta, reference)).sum()), gradient(back))


def test_the_value_loss_is_clipped_around_the_values_before() -> None:
    generator = np.random.default_rng(2)
    values, returns, before = generator.normal(size=(3, 200))
    plain = 0.5 * (values - returns) ** 2
    held = before + np.clip(values - before, -0.2, 0.2)
    leaf = torch.tensor(values, requires_grad=True)
    loss = value_loss(leaf, torch.tensor(returns), torch.tensor(before), 0.2)
    assert np.allclose(loss.detach(), np.maximum(plain, 0.5 * (held - returns) ** 2))
    loss.sum().backward()
    stopped = (np.abs(values - before) > 0.2) & (np.abs(held - returns) > np.abs(values - returns))
    assert leaf.grad is not None and 0 < stopped.sum() < 200
    assert np.allclose(leaf.grad, np.where(stopped, 0, values - returns))
    assert np.allclose(value_loss(torch.tensor(values), torch.tensor(returns)), plain)
