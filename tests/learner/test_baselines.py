"""Against the formulas as loops in float64; every attempt counts once, whichever rank or mini-batch it is in."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from argosy.buffer import Trajectory
from argosy.learner.baselines import BY_NAME, EPSILON
from argosy.learner.estimates import estimate
from argosy.learner.metrics import zero_variance_groups
from argosy.learner.packing import flatten
from argosy.learner.settings import LearnerSettings


def by_definition(name: str, own: float, others: list[float]) -> float:
    every = [own, *others]
    if name == "rloo":
        return own - statistics.fmean(others) if others else 0.0
    centred = own - statistics.fmean(every)
    return centred / (statistics.pstdev(every) + EPSILON) if name == "grpo" else centred


@pytest.mark.parametrize("name", BY_NAME)
def test_ragged_groups(name: str) -> None:
    generator = np.random.default_rng(0)
    groups = np.array([0, 1, 1, 1, 2, 2, 0, 3, 4, 4, 4])
    scores = generator.normal(size=len(groups))
    scores[groups == 4] = 0.1  # 0.1 * 3 / 3 is not 0.1 in binary
    got = BY_NAME[name](scores, groups, np.arange(len(groups)))
    for index, group in enumerate(groups):
        others = [scores[other] for other in np.flatnonzero(groups == group) if other != index]
        expected = 0.0 if group == 4 else by_definition(name, scores[index], others)
        assert got[index] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (got[groups == 4] == 0).all()
    assert BY_NAME[name](np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)).shape == (0,)


def test_leave_one_out_leaves_all_turns_of_an_attempt_out() -> None:
    scores, attempts = np.array([1.0, 2.0, 4.0, 0.5]), np.array([0, 0, 1, 2])
    got = BY_NAME["rloo"](scores, np.zeros(4, np.int64), attempts)
    assert np.allclose(got, [1 - 2.25, 2 - 2.25, 4 - 3.5 / 3, 0.5 - 7 / 3])


def settings(**advantage: Any) -> LearnerSettings:
    return LearnerSettings(stop={"steps": 1}, advantage=advantage)


@pytest.fixture
def groups(episode: Callable[..., Trajectory]) -> list[Trajectory]:
    """Three tasks with four attempts each; one of them earned the same with all."""
    generator, found = np.random.default_rng(3), []
    for index in range(12):
        group, reward = str(index // 4), 0.5 if index < 4 else float(generator.normal())
        made = episode(generator, f"t{index}", attempt=f"{group}/{index % 4}", group=group, group_size=4, reward=reward)
        trace = made.traces[0]
        early = [(int(np.flatnonzero(trace.sampled)[0]), 0.25)]
        found.append(replace(made, traces=[replace(trace, rewards=early), *episode(generator).traces]))
    return found


def advantages(trajectories: list[Trajectory], **chosen: Any) -> dict[str, np.ndarray]:
    batch = flatten(trajectories)
    learned = estimate(batch, np.zeros(len(batch.tokens), np.float32), settings(**chosen))
    spans = zip(trajectories, pairwise(batch.boundaries), strict=True)
    return {trajectory.attempt: learned.advantages[a:b] for trajectory, (a, b) in spans}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_action_has_the_advantage_of_its_attempt(name: str, alone: None, groups: list[Trajectory]) -> None:
    got = advantages(groups, name=name)
    for trajectory in groups:
        others = [t.reward for t in groups if t.group == trajectory.group and t is not trajectory]
        expected = by_definition(name, trajectory.reward, others)
        assert np.allclose(got[trajectory.attempt], expected, atol=1e-6)
    assert all(not got[f"0/{index}"].any() for index in range(4))
    assert zero_variance_groups(flatten(groups)) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("per_turn", [False, True])
def test_a_repeated_sibling_changes_nobodys_advantage(
    name: str, per_turn: bool, alone: None, groups: list[Trajectory]
) -> None:
    """A member that failed is not in the batch; a valid one may take its place a second time."""
    survivors = [trajectory for trajectory in groups if trajectory.attempt != "1/2"]
    expected = advantages(survivors, name=name, per_turn=per_turn)
    padded = advantages([*survivors, groups[5]], name=name, per_turn=per_turn)
    assert padded.keys() == expected.keys()
    for attempt, got in padded.items():
        assert np.array_equal(got, expected[attempt])
    assert zero_variance_groups(flatten([*survivors, groups[5]])) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_order_of_attempts_changes_nothing(name: str, alone: None, groups: list[Trajectory]) -> None:
    order = np.random.default_rng(0).permutation(len(groups))
    expected, got = advantages(groups, name=name), advantages([groups[index] for index in order], name=name)
    assert all(np.array_equal(got[attempt], expected[attempt]) for attempt in expected)


def test_per_turn_an_action_has_the_sum_from_its_turn_on(alone: None, groups: list[Trajectory]) -> None:
    got = advantages(groups, name="dr-grpo", per_turn=True)
    turns: dict[str, list[tuple[int, float]]] = {}  # by attempt: (actions, earned) of each turn
    for trajectory in groups:
        found = []
        for trace in trajectory.traces:
            edges = np.flatnonzero(np.diff(np.concatenate([[False], trace.sampled, [False]]).astype(int)))
            for begin, end in edges.reshape(-1, 2):
                found.append((end - begin, sum(v for position, v in trace.rewards if begin <= position < end)))
        found[-1] = (found[-1][0], found[-1][1] + trajectory.reward)
        turns[trajectory.attempt] = found
    for trajectory in groups:
        own = turns[trajectory.attempt]
        members = [t.attempt for t in groups if t.group == trajectory.group]
        mean = statistics.fmean(earned for attempt in members for _, earned in turns[attempt])
        expected = []
        for index, (actions, _) in enumerate(own):
            expected += [sum(earned - mean for _, earned in own[index:])] * actions
        assert np.allclose(got[trajectory.attempt], expected, atol=1e-5)


def test_whole_episodes_are_compared_and_nothing_else(alone: None, groups: list[Trajectory]) -> None:
    with pytest.raises(ValueError, match="1/0 is a segment of an episode, and grpo compares whole ones"):
        advantages([replace(t, status="segment") if t.attempt == "1/0" else t for t in groups], name="grpo")


def test_an_attempt_without_actions_counts_and_a_lone_one_learns_nothing(
    alone: None, groups: list[Trajectory], episode: Callable[..., Trajectory]
) -> None:
    trace = groups[4].traces[0]
    silent = replace(
        trace, sampled=np.zeros(len(trace), bool), logprobs=np.zeros(len(trace)), versions=np.full(len(trace), -1),
        rewards=[],
    )  # fmt: skip
    pair = [groups[4], replace(groups[5], traces=[silent])]
    got = advantages(pair, name="dr-grpo")
    earned = groups[4].reward + 0.25
    assert np.allclose(got["1/0"], (earned - groups[5].reward) / 2, atol=1e-6) and len(got["1/1"]) == 0
    for name in BY_NAME:
        assert not advantages([groups[4]], name=name)["1/0"].any()
    assert zero_variance_groups(flatten([groups[4]])) is None
    assert advantages([], name="grpo") == {}


def test_sources_are_judged_each_in_their_own_way(alone: None, groups: list[Trajectory]) -> None:
    mixed = [replace(t, task=replace(t.task, source="a" if t.group == "1" else "b")) for t in groups]
    batch = flatten(mixed)
    values = np.random.default_rng(0).normal(size=len(batch.tokens)).astype(np.float32)
    chosen = LearnerSettings(
        stop={"steps": 1},
        advantage={"lambda_policy": 0.9, "whiten": True},
        per_source={"a": {"advantage": {"name": "grpo"}}},
    )
    learned = estimate(batch, values, chosen)
    ours = np.array([t.task.source == "a" for t in mixed])[batch.sequence]
    apart = [
        estimate(flatten(part), part_values, one)
        for part, part_values, one in (
            ([t for t in mixed if t.task.source == "a"], _of(batch, values, "a"), settings(name="grpo")),
            ([t for t in mixed if t.task.source == "b"], _of(batch, values, "b"),
             settings(lambda_policy=0.9, whiten=True)),
        )
    ]  # fmt: skip
    assert np.allclose(learned.advantages[ours], apart[0].advantages, atol=1e-6)
    assert np.allclose(learned.advantages[~ours], apart[1].advantages, atol=1e-6)
    assert not learned.returns[ours].any() and np.allclose(learned.returns[~ours], apart[1].returns)


def _of(batch: Any, values: np.ndarray, source: str) -> np.ndarray:
    own = [batch.trajectories[episode].task.source == source for episode in batch.episode]
    return np.concatenate([values[a:b] for (a, b), mine in zip(pairwise(batch.starts), own, strict=True) if mine])
