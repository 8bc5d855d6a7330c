"""The numbers of `argosy doctor mismatch` against their definitions."""

import numpy as np
import pytest
from argosy.buffer import Task, Trace, Trajectory
from argosy.learner.mismatch import examine


def rollout(index: int, mu: np.ndarray) -> Trajectory:
    sampled = np.arange(len(mu) + 2) >= 2
    column = np.concatenate([[0, 0], mu])
    trace = Trace(np.arange(len(column)), sampled, column, np.where(sampled, 0, -1))
    where = (f"{index}/0", Task("t", "t", index), str(index), 1, 0)
    return Trajectory(f"{index}/0", *where, "env", "terminated", 1.0, {}, [trace])


def test_each_number_by_its_definition() -> None:
    rng = np.random.default_rng(0)
    mu = [-rng.random(n).astype(np.float32) - 0.1 for n in (1, 7, 40)]
    noise = [rng.normal(0, 0.4, len(part)).astype(np.float32) for part in mu]
    old = np.concatenate([a + b for a, b in zip(mu, noise)])
    found = examine([rollout(i, part) for i, part in enumerate(mu)], old)
    d = old.astype(np.float64) - np.concatenate(mu)
    rho = np.exp(d)
    assert (found["tokens"], found["episodes"]) == (48, 3)
    assert found["bias"] == pytest.approx(d.mean())
    assert found["mismatch_k3"] == pytest.approx((rho - 1 - d).mean())
    assert found["quantiles"]["1.0"] == pytest.approx(np.abs(d).max())
    assert found["touched"]["icepop"] == pytest.approx(((rho < 0.5) | (rho > 2)).mean())
    assert found["touched"]["tis"] == pytest.approx((rho > 2).mean())
    assert sum(found["histogram"].values()) == 48
    means = np.concatenate([np.full(len(part), part.mean()) for part in noise])
    outside = (np.exp(means) < 0.999) | (np.exp(means) > 1.002)
    assert found["touched"]["sequence-mask"] == pytest.approx(outside.mean())
    worst = int(np.abs(d).argmax())
    assert found["worst"][0]["learner"] == pytest.approx(float(old[worst]))
    assert found["worst"][0]["engine"] == pytest.approx(float(np.concatenate(mu)[worst]))


def test_rollouts_without_a_sampled_token_are_refused() -> None:
    nothing = rollout(0, np.zeros(0, np.float32))
    with pytest.raises(ValueError, match="no token was sampled"):
        examine([nothing], np.zeros(0, np.float32))
