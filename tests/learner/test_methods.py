"""What goes with what, against the formulas in float64: corrections, sources of different methods, and users' own."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from argosy.learner.aggregation import sequence_mean
from argosy.learner.methods import losses
from argosy.learner.settings import LearnerSettings, Method
from pydantic import ValidationError

LENGTHS = [4, 0, 1, 30, 9]
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
SIZE = sum(LENGTHS)
CORRECTIONS = ["icepop", "tis", "sequence-mask", "sequence-tis"]
OBJECTIVES = ["dis", "ppo", "grpo", "decoupled-ppo", "gspo", "gspo-token", "cispo"]


def settings(**changes: Any) -> LearnerSettings:
    return LearnerSettings(**{"stop": {"steps": 1}, **changes})


def method(objective: str, correction: str = "off", **parameters: Any) -> Method:
    advantage = {"name": "grpo"} if objective == "gspo" else {}
    chosen = {"name": objective, **parameters}
    return settings(objective=chosen, correction={"name": correction}, advantage=advantage).method(None)


def columns(seed: int = 0, mismatch: float = 0.5) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(seed)
    mu = -3 * generator.random(SIZE)
    per_episode = generator.normal(size=len(LENGTHS))[SEQUENCE] * 0.002
    old = mu + per_episode + mismatch * generator.normal(size=SIZE)
    theta = old + 0.1 * generator.normal(size=SIZE)
    found = {
        "mu": mu, "old": old, "theta": theta, "advantage": generator.normal(size=SIZE),
        "drift": sequence_mean(theta - old, SEQUENCE), "mismatch": sequence_mean(old - mu, SEQUENCE),
        "length": np.array(LENGTHS)[SEQUENCE], "entropy": generator.random(SIZE),
    }  # fmt: skip
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in found.items()}


def weights_by_definition(correction: str, old: np.ndarray, mu: np.ndarray) -> list[float]:
    found = []
    for place, index in enumerate(SEQUENCE):
        rho = math.exp(old[place] - mu[place])
        own = index == SEQUENCE
        whole = math.exp(sum(old[own] - mu[own]))
        mean = whole ** (1 / own.sum())
        found.append({
            "icepop": rho if 0.5 <= rho <= 2 else 0.0,
            "tis": min(rho, 2.0),
            "sequence-mask": 1.0 if 0.999 <= mean <= 1.002 else 0.0,
            "sequence-tis": min(whole, 2.0),
        }[correction])  # fmt: skip
    return found


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", ["ppo", "grpo", "gspo", "gspo-token", "cispo"])
def test_a_correction_multiplies_the_loss(correction: str, objective: str) -> None:
    given = columns(mismatch=0.001 if correction == "sequence-mask" else 0.5)
    plain, kept, ones = losses([method(objective)], given)
    corrected, kept_too, weight = losses([method(objective, correction)], given)
    expected = weights_by_definition(correction, given["old"].numpy(), given["mu"].numpy())
    assert (ones == 1).all() and torch.equal(kept, kept_too)
    assert np.allclose(weight, expected, rtol=1e-12) and len(set(expected)) > 1
    assert torch.allclose(corrected, plain * weight, rtol=1e-12)


def test_a_correction_has_no_gradient() -> None:
    given = columns()
    given["old"].requires_grad_()
    given["mismatch"].requires_grad_()
    for correction in CORRECTIONS:
        assert not losses([method("ppo", correction)], given)[2].requires_grad


def test_icepop_masks_both_sides() -> None:
    given = {**columns(), "old": torch.tensor([0.6, -0.6, 0.8, -0.8, math.inf, -math.inf]), "mu": torch.zeros(6)}
    given = {name: column[:6] for name, column in given.items()}
    assert (losses([method("ppo", "icepop")], given)[2] > 0).tolist() == [True, True, False, False, False, False]
    wide = settings(objective={"name": "ppo"}, correction={"name": "icepop", "low": 0.5, "high": 5.0}).method(None)
    assert (losses([wide], given)[2] > 0).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("objective", ["dis", "decoupled-ppo"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_engine_is_not_corrected_for_twice(objective: str, correction: str) -> None:
    if correction == "sequence-mask":  # which weighs nothing
        given = columns(mismatch=0.001)
        plain, _, _ = losses([method(objective)], given)
        masked, _, weight = losses([method(objective, correction)], given)
        assert torch.equal(masked, plain * weight) and 0 < weight.sum() < SIZE
    else:
        with pytest.raises(ValidationError, match="would count twice"):
            method(objective, correction)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"objective": {"name": "gspo", "old": "engine"}, "correction": {"name": "icepop"}}, "does already"),
    ({"objective": {"name": "dis", "old": "engine"}}, "no ratio to an old policy"),
    ({"objective": {"name": "decoupled-ppo", "old": "engine"}}, "cannot be the engine"),
    ({"objective": {"name": "gspo"}}, "one advantage for a whole episode"),
    ({"objective": {"name": "gspo"}, "advantage": {"name": "grpo", "per_turn": True}}, "one advantage for a whole"),
    ({"advantage": {"name": "grpo", "lambda_policy": 0.9}}, "lambda_policy is for gae"),
    ({"advantage": {"name": "rloo", "gamma": 0.9}}, "rloo has no critic that gamma"),
    ({"advantage": {"per_turn": True}}, "per_turn is for advantages against the group"),
    ({"correction": {"high": 2.0}}, "correction is off"),
    ({"correction": {"name": "tis", "low": 0.5}}, "'tis' has no setting low; it has high"),
    ({"objective": {"name": "gspo-tokens"}}, "did you mean 'gspo-token'"),
    ({"value": {"batches": 2}, "advantage": {"name": "rloo"}}, "a critic that no advantage uses"),
    ({"per_source": {"math": {"correction": {"name": "tis"}}}}, "per_source.math: dis weighs by"),
    ({"objective": {"name": "json:loads"}}, "asks for s: it can have theta"),
    ({"objective": {"name": "json:nothing"}}, "json has no 'nothing'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        settings(**changes)


def test_every_other_pair_is_accepted_and_survives_json() -> None:
    for objective in OBJECTIVES:
        for correction in ["off", *CORRECTIONS]:
            if objective not in ("dis", "decoupled-ppo"):
                method(objective, correction)
    mixed = settings(
        objective={"name": "ppo", "dual": 3.0},
        correction={"name": "icepop"},
        per_source={"math": {"objective": {"name": "gspo"}, "advantage": {"name": "grpo"}}, "code": {}},
    )
    again = LearnerSettings.model_validate_json(mixed.model_dump_json())
    assert again == mixed and [each.objective.name for each in again.methods] == ["ppo", "gspo", "ppo"]
    assert [again.which(source) for source in ("math", "code", "other")] == [1, 2, 0]
    assert again.method("math").correction.name == "icepop" and again.uses_critic


def test_each_source_has_the_losses_and_gradients_of_its_own_method() -> None:
    mixed = [method("dis"), method("gspo", "icepop"), method("ppo", "tis", entropy=0.1)]
    given = columns()
    which = np.random.default_rng(1).integers(0, 3, SIZE)
    given["theta"].requires_grad_()
    together = losses(mixed, {**given, "method": torch.tensor(which)})
    together[0].square().sum().backward()
    assert given["theta"].grad is not None
    gradient = given["theta"].grad.clone()
    for index, each in enumerate(mixed):
        own = which == index
        given["theta"].grad = None
        alone = losses([each], given)
        alone[0].square().sum().backward()
        for got, expected in zip(together, alone, strict=True):
            assert torch.equal(got[own], expected[own])
        assert torch.equal(gradient[own], given["theta"].grad[own])


def test_a_penalty_for_leaving_the_reference_is_added_to_the_loss_of_its_own_source() -> None:
    given = columns()
    given["reference"] = given["theta"] + torch.randn(SIZE, dtype=torch.float64, generator=torch.manual_seed(0))
    gap = given["theta"] - given["reference"]
    plain = losses([method("ppo", "icepop")], given)[0]
    for estimator, penalty in (("k2", gap**2 / 2), ("k3", torch.exp(-gap) - 1 + gap)):
        held = method("ppo", "icepop", kl={"weight": 0.3, "estimator": estimator})
        assert torch.allclose(losses([held], given)[0], plain + 0.3 * penalty)
    paid = method("ppo", "icepop", kl={"weight": 0.3, "estimator": "k1", "place": "reward"})
    assert torch.equal(losses([paid], given)[0], plain)
    with pytest.raises(ValidationError, match="k1 in the loss is zero on average"):
        method("ppo", kl={"weight": 0.3, "estimator": "k1"})


def test_a_method_without_actions_here_takes_no_part() -> None:
    given = {**columns(), "method": torch.zeros(SIZE)}
    alone, mixed = losses([method("dis")], given), losses([method("dis"), method("gspo", "icepop")], given)
    for got, expected in zip(mixed, alone, strict=True):
        assert torch.equal(got, expected)


OWN = """
def bounded(theta, mu, advantage, *, most=1.0):
    weight = (theta - mu).detach().exp()
    return -weight.clamp(max=most) * advantage * theta, weight <= most

def halve(old):
    return old.detach() * 0 + 0.5

def best(scores, groups, *, margin=0.0):
    return scores - scores.max() - margin

def to_go(rewards, boundaries):
    return rewards[::-1].cumsum()[::-1]

def greedy(theta, oracle):
    return theta, theta > 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    (tmp_path / "of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    return lambda name: f"of_mine:{name}"


def test_a_recipe_names_functions_of_your_own(own: Callable[[str], str]) -> None:
    given = columns()
    loss, kept, weight = losses([method(own("bounded"), parameters={"most": 1.5})], given)
    ratio = torch.exp(given["theta"] - given["mu"])
    assert torch.allclose(loss, -ratio.clamp(max=1.5) * given["advantage"] * given["theta"])
    assert torch.equal(kept, ratio <= 1.5) and (weight == 1).all()
    assert (losses([method("ppo", own("halve"))], given)[2] == 0.5).all()
    group, episode = (settings(advantage={"name": own(name)}).advantage for name in ("best", "to_go"))
    assert group.by_group and not group.by_critic and not episode.by_group and not episode.by_critic


@pytest.mark.parametrize(("changes", "reason"), [
    ({"objective": {"name": "of_mine:bounded", "parameters": {"least": 1}}}, "has no setting least; it has most"),
    ({"objective": {"name": "of_mine:greedy"}}, "asks for oracle: it can have theta, old, mu"),
    ({"objective": {"name": "of_mine:bounded"}, "correction": {"name": "icepop"}}, "would count twice"),
    ({"advantage": {"name": "of_mine:best", "parameters": {"margins": 1}}}, "has no setting margins; it has margin"),
])  # fmt: skip
def test_your_own_is_checked_as_ours_are(own: Callable[[str], str], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        settings(**changes)
