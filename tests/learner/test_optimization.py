"""An update happens as a whole, the same however the batch is cut, or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from argosy.buffer import Task, Trajectory
from argosy.learner import checkpoint, critic, policy
from argosy.learner.estimates import Estimate, estimate
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
    learned = estimate(fresh, np.zeros(len(fresh.tokens), np.float32), settings())
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


METHODS: dict[str, dict[str, Any]] = {
    "dis": {},
    "ppo": {"objective": {"name": "ppo", "dual": 3.0}, "correction": {"name": "icepop"}},
    "decoupled-ppo": {"objective": {"name": "decoupled-ppo"}, "correction": {"name": "sequence-mask", "low": 0.3}},
    "grpo": {"objective": {"name": "grpo"}, "advantage": {"name": "grpo"}, "correction": {"name": "sequence-tis"}},
    "gspo": {"objective": {"name": "gspo", "low": 0.9, "high": 9.0}, "advantage": {"name": "rloo"}},
    "gspo-token": {"objective": {"name": "gspo-token", "low": 0.9, "high": 9.0, "old": "engine"}},
    "cispo": {"objective": {"name": "cispo", "aggregation": "seq-mean-token-sum-norm", "length": 30}},
    "mixed": {
        "objective": {"name": "dis", "low": 0.99, "high": 50.0},
        "per_source": {
            "group": {"objective": {"name": "gspo", "low": 0.9, "high": 9.0}, "advantage": {"name": "grpo"}}
        },
    },
}


@pytest.fixture
def windows(episode: Callable[..., Trajectory]) -> Batch:
    """Two groups of four, the first of a task source of its own; most episodes have several context windows."""
    generator = np.random.default_rng(9)
    found = []
    for index in range(8):
        made = episode(
            generator, f"t{index}", attempt=f"{index // 4}/{index % 4}", group=str(index // 4), reward=float(index % 2),
            version=index % 3, task=Task("a/0", "group" if index < 4 else "other", 0),
        )  # fmt: skip
        more = [trace for _ in range(index % 3) for trace in episode(generator).traces]
        found.append(replace(made, traces=[*made.traces, *more]))
    return flatten(found)


def near_mu(model_dir: Path, batch: Batch) -> Batch:
    """The episodes as an engine with slightly other weights would have sampled them."""
    trainee = Trainee(Policy(model_dir), FAST)
    exact = policy.look(trainee, batch, settings())
    return replace(batch, mu=(exact + 0.3 * np.random.default_rng(0).normal(size=len(exact))).astype(np.float32))


def improve(model_dir: Path, batch: Batch, chosen: LearnerSettings) -> tuple[list[Any], dict[str, torch.Tensor]]:
    trainee = Trainee(Policy(model_dir), FAST)
    values = np.sin(batch.tokens).astype(np.float32)  # a critic that knows nothing but the token
    step = policy.improve(trainee, batch, estimate(batch, values, chosen), chosen)
    assert all(update.applied for update in step.updates)
    return [(update.loss, update.grad_norm) for update in step.updates], snapshot(trainee)


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Root mean square difference; AdamW moves a weight whose gradient is mere rounding by up to 1e-2 all the same."""
    gaps = torch.cat([(left[name] - tensor).flatten() for name, tensor in right.items()])
    return float(gaps.square().mean().sqrt())


@pytest.mark.parametrize("name", METHODS)
def test_no_method_depends_on_the_cut(name: str, model_dir: Path, alone: None, windows: Batch) -> None:
    """Whole episodes in one micro-batch, or every context window in its own."""
    batch = near_mu(model_dir, windows)
    results = [
        improve(model_dir, batch, settings(**METHODS[name], minibatches=2, tokens_per_microbatch=budget))
        for budget in (1, 90, 100_000)
    ]
    for updates, weights in results[1:]:
        assert np.allclose(updates, results[0][0], rtol=1e-4, atol=1e-6)
        assert apart(weights, results[0][1]) < 1e-5


@pytest.mark.parametrize("old", ["engine", "learner"])
def test_the_gradient_of_whole_episodes_is_exact(old: str, model_dir: Path, alone: None, windows: Batch) -> None:
    """GSPO as the paper writes it, through the mean over all windows of an episode, against one window at a time."""
    batch = near_mu(model_dir, windows)
    whole = {"advantage": {"name": "grpo"}, "objective": {"name": "gspo", "low": 0.2, "high": 0.2, "old": old}}
    chosen = settings(**whole, tokens_per_microbatch=1)
    updates, weights = improve(model_dir, batch, chosen)

    learned = estimate(batch, np.zeros(len(batch.tokens), np.float32), chosen)
    trainee = Trainee(Policy(model_dir), FAST)
    exact = policy.look(trainee, batch, chosen)
    columns = {"old": batch.mu if old == "engine" else exact, "advantage": learned.advantages, "at": batch.sequence}

    def paper(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        theta, at = output[0], microbatch.columns["at"]
        total = torch.zeros(())
        for index in range(len(batch.trajectories)):
            own = at == index
            s = (theta - microbatch.columns["old"])[own].mean().exp()
            a = microbatch.columns["advantage"][own][0]
            total = total - torch.minimum(s * a, s.clamp(0.8, 1.2) * a)
        return total / len(batch.trajectories) * len(at), []  # `update` divides by the number of actions

    everything = gather(batch, plan(batch, 100_000)[0], columns, CPU)
    update = trainee.update([everything], paper)
    assert updates[0] == pytest.approx((update.loss, update.grad_norm), rel=1e-4, abs=1e-6)
    assert apart(weights, snapshot(trainee)) < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_no_method_depends_on_the_order_of_episodes(name: str, model_dir: Path, alone: None, windows: Batch) -> None:
    batch = near_mu(model_dir, windows)
    order = np.random.default_rng(1).permutation(len(batch.trajectories))
    shuffled = flatten([batch.trajectories[index] for index in order])
    spans = [np.arange(*batch.boundaries[index : index + 2]) for index in order]
    shuffled = replace(shuffled, mu=batch.mu[np.concatenate(spans)])
    chosen = settings(**METHODS[name])
    (updates, weights), (again, weights_too) = (improve(model_dir, each, chosen) for each in (batch, shuffled))
    assert np.allclose(updates, again, rtol=1e-4, atol=1e-6) and apart(weights, weights_too) < 1e-5


AVERAGES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("default", AVERAGES)
@pytest.mark.parametrize("other", AVERAGES)
def test_losses_are_averaged_as_their_source_says(
    default: str, other: str, model_dir: Path, alone: None, windows: Batch
) -> None:
    batch = near_mu(model_dir, windows)
    wide = {"low": 1.0, "high": 1e6, "length": 30}
    chosen = settings(
        objective={**wide, "aggregation": default},
        per_source={"group": {"objective": {**wide, "aggregation": other}}},
        tokens_per_microbatch=90,
    )
    trainee = Trainee(Policy(model_dir), FAST)
    learned = estimate(batch, np.zeros(len(batch.tokens), np.float32), chosen)
    step = policy.improve(trainee, batch, learned, chosen)
    each = -np.exp(step.before.astype(np.float64) - batch.mu) * learned.advantages * step.before
    expected, episodes = 0.0, list(zip(batch.trajectories, batch.boundaries[:-1], batch.boundaries[1:], strict=True))
    for kind in AVERAGES:
        own = [each[a:b] for t, a, b in episodes if (other if t.task.source == "group" else default) == kind]
        if own:
            expected += len(own) / len(episodes) * {
                "token-mean": np.concatenate(own).mean(),
                "seq-mean-token-mean": np.mean([losses.mean() for losses in own]),
                "seq-mean-token-sum-norm": np.mean([losses.sum() / 30 for losses in own]),
            }[kind]  # fmt: skip
    assert step.updates[0].loss == pytest.approx(expected, rel=1e-4)


def test_naming_a_source_changes_nothing_by_itself(model_dir: Path, alone: None, windows: Batch) -> None:
    batch = near_mu(model_dir, windows)
    chosen = {"objective": {"name": "gspo-token", "low": 0.5, "high": 9.0}, "minibatches": 2}
    plain, named = (
        improve(model_dir, batch, settings(**chosen, **more)) for more in ({}, {"per_source": {"group": {}}})
    )
    assert np.allclose(plain[0], named[0], rtol=1e-5) and apart(plain[1], named[1]) < 1e-5


def test_several_critic_updates_are_held_near_the_values_before(model_dir: Path, alone: None, batch: Batch) -> None:
    moved = []
    for clip in (None, 1e-3):
        trainee = Trainee(Critic(model_dir), OptimizerSettings(lr=3e-3, beta2=0.999))
        chosen = settings(critic={"value_clip": clip})
        step = critic.learn(trainee, batch, chosen, updates=8)
        after = critic.predict(trainee, batch, chosen)
        moved.append(np.abs(after - step.values)[batch.actions].mean())
        assert np.array_equal(step.values, critic.predict(Trainee(Critic(model_dir), FAST), batch, chosen))
    assert moved[1] < 0.5 * moved[0]


def test_a_critic_judges_and_learns_from_its_own_sources_alone(model_dir: Path, alone: None, windows: Batch) -> None:
    chosen = settings(per_source={"group": {"advantage": {"name": "grpo"}}})
    trainee = Trainee(Critic(model_dir), FAST)
    trainee.model.output_layer.weight.data.normal_()
    trainee.optimizer.reload_model_params()
    step = critic.learn(trainee, windows, chosen, updates=1)
    of_group = np.array([windows.trajectories[e].task.source == "group" for e in windows.episode])
    positions = np.repeat(of_group, np.diff(windows.starts))
    assert not step.values[positions].any() and step.values[~positions].all()
    returns = np.array([t.reward for t in windows.trajectories])[windows.sequence]
    own = ~np.array([t.task.source == "group" for t in windows.trajectories])[windows.sequence]
    expected = 0.5 * (step.values[windows.actions] - returns)[own] ** 2
    assert step.updates[0].loss == pytest.approx(expected.mean(), rel=1e-4)
    none = critic.learn(None, windows, settings(advantage={"name": "grpo"}), updates=2)
    assert none.updates == [] and not none.values.any()


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_frozen_attention_stays_and_the_rest_moves(
    kind: Any, model_dir: Path, tmp_path: Path, alone: None, batch: Batch
) -> None:
    frozen = OptimizerSettings(lr=1e-2, frozen="attention")
    trainee = Trainee(kind(model_dir), frozen)
    before = snapshot(trainee)

    def learn(trainee: Trainee) -> None:
        if kind is Critic:
            critic.learn(trainee, batch, settings(), updates=2)
        else:
            supervise(trainee, batch, 100)

    learn(trainee)
    moved = {name for name, tensor in snapshot(trainee).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".self_attention." not in name}
    checkpoint.save(tmp_path, 1, {"model": trainee}, {})
    again = Trainee(kind(model_dir), frozen)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    checkpoint.load(found, {"model": again})
    for each in (trainee, again):
        learn(each)
    assert same(snapshot(trainee), snapshot(again))
