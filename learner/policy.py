"""The policy's work: one claimed batch, one or more optimizer steps.

Invariant: the diagnostics compare the engine with the learner as it was when it claimed the batch, so they are taken
before any update on it. A batch without signal is looked at but moves nothing: AdamW's momentum would otherwise carry
the weights on without a gradient.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import ranks
from .aggregation import seq_mean_token_mean, seq_mean_token_sum_norm, sequence_mean, token_mean
from .estimates import Estimate, which
from .methods import losses
from .metrics import divergence, engine_mismatch
from .optimization import Evaluator, Trainee, Update
from .packing import Batch, MicroBatch, gather, plan
from .settings import LearnerSettings


@dataclass(frozen=True)
class PolicyStep:
    """The updates that were tried (none for a batch without signal) and what the batch looked like before them."""

    updates: list[Update]
    before: np.ndarray
    """float32[K], the log-probability of each action before any update."""
    diagnostics: dict[str, float]

    @property
    def moved(self) -> bool:
        return any(update.applied for update in self.updates)


def improve(
    policy: Trainee,
    batch: Batch,
    estimate: Estimate,
    settings: LearnerSettings,
    reference: np.ndarray | None = None,
) -> PolicyStep:
    """Takes `settings.minibatches` optimizer steps on the batch, each on its share of the episodes.

    `reference` is float32[K], the log-probabilities of the policy to stay near, where the settings use one.
    """
    if not estimate.carries_signal:
        return watch(policy, batch, settings)
    methods, method = settings.methods, which(batch, settings)[batch.sequence]
    asked = frozenset[str]().union(*(each.asks for each in methods))
    columns = {
        "mu": batch.mu,
        "advantage": estimate.advantages,
        "length": batch.lengths[batch.sequence],
        "method": method,
        **({} if reference is None else {"reference": reference}),
    }
    # With one update and no ratio of whole episodes the update's own forward pass tells what is asked for of `old`.
    if settings.minibatches > 1 or asked & {"drift", "mismatch"}:
        old = look(policy, batch, settings)
        columns |= {"old": old, "mismatch": sequence_mean(old - batch.mu, batch.sequence)}

    def loss(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        theta, entropy = output
        given = {"old": theta.detach(), **microbatch.columns, "theta": theta, "entropy": entropy}
        each, kept, weight = losses(methods, given)
        return (given["share"] * each).sum(), [theta, entropy, kept, weight]

    updates: list[Update] = []
    theta, entropy, kept, weight = (np.zeros(len(batch.actions), np.float32) for _ in range(4))
    for part, episodes in enumerate(_minibatches(batch, settings.minibatches)):
        columns["share"] = _shares(batch, episodes, settings)
        if "drift" in asked:
            now = look(policy, batch, settings, episodes) if part else columns["old"]
            engine = np.array([each.objective.old == "engine" for each in methods])[method]
            columns["drift"] = sequence_mean(now - np.where(engine, batch.mu, columns["old"]), batch.sequence)
        microbatches = _microbatches(batch, settings, columns, episodes)
        updates.append(policy.update(microbatches, loss))
        for flat, outputs in zip((theta, entropy, kept, weight), updates[-1].outputs, strict=True):
            _scatter(flat, microbatches, outputs)
    before = columns.get("old", theta)
    return PolicyStep(
        updates,
        before,
        {
            **engine_mismatch(before, batch.mu),
            "entropy": ranks.moments(entropy)[0],
            **({} if reference is None else {"reference_kl": divergence(theta, reference)}),
            "clip_share": 1.0 - ranks.moments(kept)[0],
            "corrected_share": ranks.moments(weight == 0)[0],
            "masked_share": 1.0 - ranks.moments(kept * (weight != 0))[0],
        },
    )


def _minibatches(batch: Batch, count: int) -> list[np.ndarray]:
    """The episodes of each mini-batch, int64 each: in the order of the claim, so that groups stay together."""
    places = ranks.places(len(batch.trajectories))
    total = ranks.total(np.array([len(places)], np.float64))[0]
    return [np.flatnonzero(places * count // max(total, 1) == part) for part in range(count)]


def _shares(batch: Batch, episodes: np.ndarray, settings: LearnerSettings) -> np.ndarray:
    """What an action's loss counts in the mean over the actions of an update on `episodes`: float64[K], 0 elsewhere.

    With one aggregation the mean of share x loss is that aggregation. Where task sources differ in it, each kind weighs
    as much as its part of the sequences; within a kind, which method an action belongs to makes no difference.
    """
    objectives = [method.objective for method in settings.methods]
    lengths, method = batch.lengths[episodes], which(batch, settings)[episodes]
    by_token = np.array([objective.averaged == "token-mean" for objective in objectives])[method]
    counts = [lengths.sum(), (lengths > 0).sum(), lengths[by_token].sum(), (lengths[by_token] > 0).sum()]
    actions, sequences, of_actions, of_sequences = np.maximum(ranks.total(np.array(counts, np.float64)), 1)
    share = np.zeros(len(batch.trajectories))
    for index, objective in enumerate(objectives):
        own = episodes[method == index]
        if objective.averaged == "token-mean":
            weight = token_mean(batch.lengths[own], of_actions) * of_sequences / sequences
        elif objective.averaged == "seq-mean-token-mean":
            weight = seq_mean_token_mean(batch.lengths[own], sequences)
        else:
            weight = seq_mean_token_sum_norm(batch.lengths[own], sequences, objective.length)
        share[own] = weight * actions
    return share[batch.sequence]


def watch(policy: Trainee, batch: Batch, settings: LearnerSettings) -> PolicyStep:
    """Looks at the batch and moves nothing."""
    before = look(policy, batch, settings)
    return PolicyStep([], before, engine_mismatch(before, batch.mu))


def look(policy: Evaluator, batch: Batch, settings: LearnerSettings, episodes: np.ndarray | None = None) -> np.ndarray:
    """The policy's log-probability of each action of `episodes` (all by default), float32[K], without gradient."""

    def logprobs(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return output[0].sum(), [output[0]]

    microbatches = _microbatches(batch, settings, {}, episodes)
    flat = np.zeros(len(batch.actions), np.float32)
    _scatter(flat, microbatches, policy.forward(microbatches, logprobs)[0])
    return flat


def _microbatches(
    batch: Batch, settings: LearnerSettings, columns: dict[str, np.ndarray], episodes: np.ndarray | None
) -> list[MicroBatch]:
    parts = plan(batch, settings.tokens_per_microbatch, episodes)
    return [gather(batch, part, columns, ranks.device()) for part in parts]


def _scatter(flat: np.ndarray, microbatches: list[MicroBatch], outputs: list[np.ndarray]) -> None:
    for microbatch, output in zip(microbatches, outputs, strict=True):
        flat[microbatch.which] = output
