"""An update happens as a whole, the same however the batch is cut, or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from argosy.buffer import Trajectory
from argosy.learner import critic, policy
from argosy.learner.advantages import Estimate, estimate
from argosy.learner.model import Critic, Policy
from argosy.learner.optimization import Trainee
from argosy.learner.packing import Batch, MicroBatch, flatten, gather, plan
from argosy.learner.settings import LearnerSettings, OptimizerSettings, StopSettings

CPU = torch.device("cpu")
FAST = OptimizerSettings(lr=1e-2, beta2=0.95, clip=0.5)


def settings(**changes: Any) -> LearnerSettings:
    return LearnerSettings(stop=StopSettings(steps=1), **changes)


def snapshot(trainee: Trainee) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainee.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> bool:
    return all(bool(((left[name] - right[name]).abs() <= tolerance).all()) for name in left)


@pytest.fixture
def batch(episode: Callable[..., Trajectory]) -> Batch:
    generator = np.random.default_rng(7)
    return flatten([episode(generator, f"t{i}", reward=float(i % 2)) for i in range(8)])


def supervise(trainee: Trainee, batch: Batch, budget: int, scale: float = 1.0) -> Any:
    def loss(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return -(output[0] * microbatch.columns["weight"]).sum() * scale, [output[0]]

    weights = {"weight": np.linspace(0.5, 1.5, len(batch.actions))}
    return trainee.update([gather(batch, part, weights, CPU) for part in plan(batch, budget)], loss)


def test_three_updates_agree_with_transformers_and_torch(
    model_dir: Path, alone: None, reference: Any, batch: Batch
) -> None:
    ours, theirs = Trainee(Policy(model_dir), FAST), reference(model_dir).train()
    theirs.model.embed_tokens.padding_idx = None  # transformers gives the padding token no gradient
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    weights = torch.linspace(0.5, 1.5, len(batch.actions))
    for _ in range(3):
        update = supervise(ours, batch, budget=100)
        scored = []
        for trajectory in batch.trajectories:
            trace = trajectory.traces[0]
            tokens = torch.from_numpy(trace.tokens.astype(np.int64))
            every = torch.log_softmax(theirs(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
            scored.append(every[torch.from_numpy(trace.sampled[1:])])
        loss = -(torch.cat(scored) * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        assert update.loss == pytest.approx(loss.item(), abs=1e-5)
        assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    head = theirs.get_parameter("lm_head.weight")
    assert (ours.model.output_layer.weight - head).abs().max() < 1e-4


def test_the_gradient_does_not_depend_on_the_split(model_dir: Path, alone: None, batch: Batch) -> None:
    results = []
    for budget in (1, 90, 100_000):
        trainee = Trainee(Policy(model_dir), FAST)
        update = supervise(trainee, batch, budget)
        results.append((update.loss, update.grad_norm, snapshot(trainee)))
    for loss, norm, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6) and norm == pytest.approx(results[0][1], rel=1e-5)
        assert same(weights, results[0][2], 2e-5)


def test_what_is_not_finite_or_not_there_moves_nothing(model_dir: Path, alone: None, batch: Batch) -> None:
    trainee = Trainee(Policy(model_dir), FAST)
    assert supervise(trainee, batch, 100).applied  # now there is momentum
    before = snapshot(trainee)
    broken = supervise(trainee, batch, 100, scale=float("nan"))
    assert not broken.finite and not broken.applied and same(snapshot(trainee), before)
    empty = supervise(trainee, batch, 100, scale=0.0)
    assert empty.finite and not empty.applied and same(snapshot(trainee), before)
    assert supervise(trainee, batch, 100).applied and not same(snapshot(trainee), before)


def test_tokens_that_were_not_sampled_have_no_influence_of_their_own(
    model_dir: Path, alone: None, episode: Callable[..., Trajectory]
) -> None:
    """What follows the last action is no context for anything: changing it changes no number and no gradient."""
    trajectory = episode(np.random.default_rng(4), length=40)
    trace = trajectory.traces[0]
    sampled, logprobs, versions = trace.sampled.copy(), trace.logprobs.copy(), trace.versions.copy()
    sampled[30:], logprobs[30:], versions[30:] = False, 0, -1
    results = []
    for filler in (5, 6):
        tokens = trace.tokens.copy()
        tokens[30:] = filler
        changed = replace(trace, tokens=tokens, sampled=sampled, logprobs=logprobs, versions=versions, turns=[])
        trainee = Trainee(Policy(model_dir), FAST)
        update = supervise(trainee, flatten([replace(trajectory, traces=[changed])]), 100)
        results.append((update.loss, update.grad_norm, snapshot(trainee)))
    assert results[0][:2] == results[1][:2] and same(results[0][2], results[1][2])


def test_a_batch_without_signal_is_looked_at_and_skipped(model_dir: Path, alone: None, batch: Batch) -> None:
    trainee = Trainee(Policy(model_dir), FAST)
    assert supervise(trainee, batch, 100).applied
    before = snapshot(trainee)
    flat = np.ones(len(batch.actions), np.float32)
    step = policy.improve(trainee, batch, Estimate(flat, flat, mean=1.0, spread=0.0), settings())
    assert not step.moved and step.updates == [] and step.diagnostics["mismatch_k3"] > 0
    assert same(snapshot(trainee), before)


@pytest.mark.parametrize("objective", ["dis", "ppo"])
def test_minibatches_share_out_the_episodes(model_dir: Path, alone: None, batch: Batch, objective: str) -> None:
    trainee = Trainee(Policy(model_dir), FAST)
    mine = policy.look(trainee, batch, settings())
    fresh = flatten(
        [_with_logprobs(t, mine[a:b]) for t, a, b in zip(
            batch.trajectories, batch.boundaries[:-1], batch.boundaries[1:], strict=True)]
    )  # fmt: skip
    learned = estimate(fresh, np.zeros(len(fresh.tokens), np.float32), settings().advantage)
    step = policy.improve(trainee, fresh, learned, settings(minibatches=3, objective={"name": objective}))
    assert [update.applied for update in step.updates] == [True] * 3
    assert sum(len(part) for update in step.updates for part in update.outputs[0]) == len(fresh.actions)
    assert step.diagnostics["mismatch_max"] < 1e-5 and step.diagnostics["ess"] == pytest.approx(1.0)
    first = step.updates[0].outputs[0]
    assert sum(map(len, first)) < len(fresh.actions)


def _with_logprobs(trajectory: Trajectory, values: np.ndarray) -> Trajectory:
    trace = trajectory.traces[0]
    logprobs = trace.logprobs.copy()
    logprobs[trace.sampled] = values
    return replace(trajectory, traces=[replace(trace, logprobs=logprobs)])


def test_the_critic_learns_and_its_values_are_from_before(model_dir: Path, alone: None, batch: Batch) -> None:
    trainee = Trainee(Critic(model_dir), OptimizerSettings(lr=3e-3, beta2=0.999))
    chosen = settings(tokens_per_microbatch=100)
    before = critic.predict(trainee, batch, chosen)
    first = critic.learn(trainee, batch, chosen, updates=1)
    assert np.array_equal(first.values, before)
    for _ in range(15):
        last = critic.learn(trainee, batch, chosen, updates=2)
    assert last.updates[-1].loss < 0.5 * first.updates[0].loss


def test_unfinished_episodes_give_the_critic_bootstrapped_targets(
    model_dir: Path, alone: None, episode: Callable[..., Trajectory]
) -> None:
    trainee = Trainee(Critic(model_dir), OptimizerSettings(lr=3e-3, beta2=0.999))
    generator = np.random.default_rng(0)
    batch = flatten([episode(generator, f"t{i}", status="segment", reward=0.0) for i in range(4)])
    if trainee.model.post_process:
        trainee.model.output_layer.weight.data.normal_()
        trainee.optimizer.reload_model_params()
    values = critic.predict(trainee, batch, settings())
    step = critic.learn(trainee, batch, settings(), updates=1)
    expected = np.repeat(values[batch.ends], np.diff(batch.boundaries))
    loss = 0.5 * ((values[batch.actions] - expected) ** 2).mean()
    assert np.array_equal(step.values, values) and step.updates[0].loss == pytest.approx(loss, rel=1e-4)
