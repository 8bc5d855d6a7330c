"""What is averaged is exactly what was sampled, wherever it ends up in a micro-batch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from argosy.buffer import Trace, Trajectory
from argosy.learner.packing import flatten, gather, plan

CPU = torch.device("cpu")


@pytest.fixture
def episodes(episode: Callable[..., Trajectory]) -> list[Trajectory]:
    generator = np.random.default_rng(3)
    several = [episode(generator, f"t{i}") for i in range(9)]
    windows = [*several[1].traces, *several[2].traces, *several[3].traces]
    return [several[0], replace(several[1], traces=windows), *several[4:]]


def test_actions_are_the_sampled_tokens_and_nothing_else(episodes: list[Trajectory]) -> None:
    batch = flatten(episodes)
    traces = [trace for trajectory in episodes for trace in trajectory.traces]
    mask = np.zeros(len(batch.tokens), bool)
    mask[batch.actions + 1] = True
    assert np.array_equal(mask, np.concatenate([trace.sampled for trace in traces]))
    assert np.array_equal(batch.targets, np.concatenate([trace.tokens[trace.sampled] for trace in traces]))
    assert np.array_equal(batch.mu, np.concatenate([trace.logprobs[trace.sampled] for trace in traces]))
    assert np.array_equal(np.diff(batch.boundaries), [trajectory.n_sampled for trajectory in episodes])


@pytest.mark.parametrize("budget", [1, 70, 100_000])
def test_micro_batches_hold_every_action_once_behind_its_own_context(episodes: list[Trajectory], budget: int) -> None:
    batch = flatten(episodes)
    parts = plan(batch, budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch.episode)))
    marks = np.arange(len(batch.actions), dtype=np.float32)
    seen = []
    for part in parts:
        microbatch = gather(batch, part, {"mark": marks}, CPU)
        assert len(part) == 1 or microbatch.tokens.shape[1] <= budget
        tokens, at = microbatch.tokens[0].numpy(), microbatch.actions.numpy()
        assert np.array_equal(tokens, batch.tokens[microbatch.positions])
        assert np.array_equal(microbatch.positions[at], batch.actions[microbatch.which])
        assert np.array_equal(tokens[at + 1], microbatch.targets.numpy())
        assert np.array_equal(microbatch.columns["mark"].numpy(), microbatch.which)
        seen += microbatch.which.tolist()
    assert sorted(seen) == list(range(len(batch.actions)))


def test_attention_groups_cover_each_sequence_once(episodes: list[Trajectory]) -> None:
    batch = flatten(episodes)
    microbatch = gather(batch, plan(batch, 100_000)[0], {}, CPU)
    covered = torch.cat([index.flatten()[real] for index, real in microbatch.packed.groups])
    assert torch.equal(covered, torch.arange(len(batch.tokens)))


def test_rewards_go_to_the_token_that_earned_them(episode: Callable[..., Trajectory]) -> None:
    sampled = np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
    trace = Trace(
        tokens=np.arange(8), sampled=sampled, logprobs=np.zeros(8), versions=np.where(sampled, 1, -1),
        rewards=[(3, 0.5), (4, 0.25), (7, 2.0)],
    )  # fmt: skip
    trajectory = episode(np.random.default_rng(0), traces=[trace], reward=1.0)
    assert flatten([trajectory]).rewards.tolist() == [0.0, 0.75, 3.0]
    early = replace(trajectory, traces=[replace(trace, rewards=[(1, 1.0)])])
    with pytest.raises(ValueError, match="precedes every sampled token"):
        flatten([early])


def test_a_trace_that_begins_with_a_sampled_token_is_refused(episode: Callable[..., Trajectory]) -> None:
    trace = Trace(tokens=[1, 2], sampled=[True, False], logprobs=[0, 0], versions=[0, -1])
    with pytest.raises(ValueError, match="nothing predicts it"):
        flatten([episode(np.random.default_rng(0), traces=[trace])])


def test_an_episode_without_actions_and_an_empty_share_are_fine(episode: Callable[..., Trajectory]) -> None:
    trace = Trace(tokens=[1, 2, 3], sampled=[False] * 3, logprobs=[0] * 3, versions=[-1] * 3)
    batch = flatten([episode(np.random.default_rng(0), traces=[trace], reward=1.0)])
    assert len(batch.actions) == 0 and batch.boundaries.tolist() == [0, 0]
    empty = flatten([])
    microbatch = gather(empty, plan(empty, 100)[0], {"x": np.zeros(0)}, CPU)
    assert microbatch.tokens.shape == (1, 1) and len(microbatch.actions) == 0
