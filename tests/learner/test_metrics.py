"""Numbers against their definitions in float64, and alarms that fire on the wrong side of a limit alone."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from argosy.buffer import Trajectory
from argosy.learner import metrics
from argosy.learner.packing import flatten


def test_engine_mismatch(alone: None) -> None:
    generator = np.random.default_rng(0)
    old, mu = (generator.normal(size=(2, 300)) * 0.3 - 1).astype(np.float32)
    got = metrics.engine_mismatch(old, mu)
    logs = [float(a) - float(b) for a, b in zip(old, mu, strict=True)]
    rho = [math.exp(log) for log in logs]
    assert got == pytest.approx({
        "mismatch_k1": -sum(logs) / 300,
        "mismatch_k3": sum(r - 1 - log for r, log in zip(rho, logs, strict=True)) / 300,
        "mismatch_max": max(map(abs, logs)),
        "ess": sum(rho) ** 2 / (300 * sum(r * r for r in rho)),
    }, rel=1e-10)  # fmt: skip
    assert metrics.divergence(mu, old) == pytest.approx(got["mismatch_k3"], rel=1e-10)


def test_the_edges_of_engine_mismatch(alone: None) -> None:
    nothing = metrics.engine_mismatch(np.zeros(0, np.float32), np.zeros(0, np.float32))
    assert nothing == {"mismatch_k1": 0, "mismatch_k3": 0, "mismatch_max": 0, "ess": 1}
    same = np.full(7, -2.0, np.float32)
    assert metrics.engine_mismatch(same, same) == {"mismatch_k1": 0, "mismatch_k3": 0, "mismatch_max": 0, "ess": 1}
    one = metrics.engine_mismatch(np.array([0.0, -1e3]), np.array([0.0, 0.0]))
    assert one["ess"] == 0.5 and one["mismatch_max"] == 1e3
    assert all(map(math.isfinite, metrics.engine_mismatch(np.array([1e3]), np.array([0.0])).values()))


def test_explained_variance(alone: None) -> None:
    generator = np.random.default_rng(0)
    returns = generator.normal(size=100)
    values = returns + 0.3 * generator.normal(size=100)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert metrics.explained_variance(values, returns) == pytest.approx(expected)
    assert metrics.explained_variance(values, np.ones(100)) is None


def test_staleness_is_counted_by_episode_and_by_token(alone: None, episode: Callable[..., Trajectory]) -> None:
    generator = np.random.default_rng(1)
    made = [episode(generator, f"t{i}", version=version) for i, version in enumerate([5, 5, 3])]
    trace = made[0].traces[0]
    first = int(np.flatnonzero(trace.sampled)[0])
    versions = trace.versions.copy()
    versions[first] = 2  # its other tokens came from newer weights
    made[0] = replace(made[0], traces=[replace(trace, versions=versions)])
    got = metrics.staleness(flatten(made), lambda version: 5 - version)
    tokens = [trajectory.n_sampled for trajectory in made]
    assert got["staleness_episodes"] == [1, 0, 1, 1]
    assert got["staleness_tokens"] == [tokens[0] - 1 + tokens[1], 0, tokens[2], 1]
    assert got["staleness_max"] == 3 and got["staleness_mean"] == pytest.approx(5 / 3)
    assert got["staleness_token_mean"] == pytest.approx((3 + 2 * tokens[2]) / sum(tokens))


def test_tokens_are_counted_by_who_wrote_them(alone: None, episode: Callable[..., Trajectory]) -> None:
    made = episode(np.random.default_rng(1), length=40)
    trace = made.traces[0]
    turns, at = [], 0
    for turn in trace.turns:  # what lies between two of the policy's turns came from a tool, but for a template's token
        if turn.start > at + 1:
            turns.append(turn._replace(start=at + 1, end=turn.start, role="tool"))
        turns.append(turn)
        at = turn.end
    batch = flatten([replace(made, traces=[replace(trace, turns=turns)])])
    got = metrics.contents(batch)["tokens_by_kind"]
    tool = sum(turn.end - turn.start for turn in turns if turn.role == "tool")
    assert got == {"sampled": made.n_sampled, "tool": tool, "template": 40 - made.n_sampled - tool}


def test_narrowing_is_only_noticed_without_success() -> None:
    half = metrics.SPAN // 2
    history = [(1.0, 0.2)] * half + [(0.4, 0.2)] * half
    assert metrics.narrowing(history) == pytest.approx(0.4)
    assert metrics.narrowing(history[1:]) is None
    assert metrics.narrowing([(1.0, 0.2)] * half + [(0.4, 0.3)] * half) is None


@pytest.mark.parametrize(("record", "names"), [
    ({"masked_share": 0.1, "ess": 0.9, "mismatch_k3": 0.001, "entropy": 0.5, "grad_norm": 1.0}, []),
    ({"masked_share": 0.3}, ["masked_share"]),
    ({"corrected_share": 0.5, "ess": 0.2}, ["corrected_share", "ess"]),
    ({"mismatch_k3": math.nan}, ["mismatch_k3"]),
    ({"entropy_trend": 0.3, "explained_variance": -0.5}, ["entropy_trend", "explained_variance"]),
    ({"zero_variance_groups": 0.95, "grad_norm": 100.0}, ["grad_norm", "zero_variance_groups"]),
    ({"explained_variance": None, "zero_variance_groups": None, "grad_norm": None}, []),
])  # fmt: skip
def test_an_alarm_says_the_value_the_limit_and_what_to_try(record: dict[str, Any], names: list[str]) -> None:
    raised = metrics.alarms(record)
    assert sorted(alarm["name"] for alarm in raised) == names
    for alarm in raised:
        assert alarm["limit"] is not None and len(alarm["hint"]) > 20
        assert alarm["value"] is record[alarm["name"]]
