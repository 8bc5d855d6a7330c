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
from .advantages import Estimate
from .metrics import engine_mismatch, mean_and_std
from .objectives import dis, ppo, staleness_weight
from .optimization import Trainee, Update
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


def improve(policy: Trainee, batch: Batch, estimate: Estimate, settings: LearnerSettings) -> PolicyStep:
    """Takes `settings.minibatches` optimizer steps on the batch, each on its share of the episodes."""
    objective = settings.objective
    columns = {"mu": batch.mu, "advantage": estimate.advantages}
    if settings.minibatches > 1 or not estimate.carries_signal:
        columns["old"] = look(policy, batch, settings)

    def loss(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        theta, entropy = output
        mu, advantage = microbatch.columns["mu"], microbatch.columns["advantage"]
        if objective.name == "dis":
            each, kept = dis(theta, mu, advantage, objective.low, objective.high)
        else:
            old = microbatch.columns.get("old", theta.detach())
            each, kept = ppo(theta, old, advantage, objective.low, objective.high)
            each = each * staleness_weight(old, mu)
        return (each - objective.entropy * entropy).sum(), [theta, entropy, kept]

    if not estimate.carries_signal:
        return PolicyStep([], columns["old"], engine_mismatch(columns["old"], batch.mu))
    updates: list[Update] = []
    theta, entropy, kept = (np.zeros(len(batch.actions), np.float32) for _ in range(3))
    for part in range(settings.minibatches):
        episodes = range(part, len(batch.trajectories), settings.minibatches)
        microbatches = _microbatches(batch, settings, columns, episodes)
        updates.append(policy.update(microbatches, loss))
        for flat, outputs in zip((theta, entropy, kept), updates[-1].outputs, strict=True):
            _scatter(flat, microbatches, outputs)
    before = columns.get("old", theta)
    return PolicyStep(
        updates,
        before,
        {
            **engine_mismatch(before, batch.mu),
            "entropy": mean_and_std(entropy)[0],
            "masked_share": 1.0 - mean_and_std(kept)[0],
        },
    )


def look(policy: Trainee, batch: Batch, settings: LearnerSettings) -> np.ndarray:
    """The policy's log-probability of each action, float32[K], without gradient."""

    def logprobs(microbatch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return output[0].sum(), [output[0]]

    microbatches = _microbatches(batch, settings, {}, range(len(batch.trajectories)))
    flat = np.zeros(len(batch.actions), np.float32)
    _scatter(flat, microbatches, policy.forward(microbatches, logprobs)[0])
    return flat


def _microbatches(
    batch: Batch, settings: LearnerSettings, columns: dict[str, np.ndarray], episodes: range
) -> list[MicroBatch]:
    parts = plan(batch, settings.tokens_per_microbatch, episodes)
    return [gather(batch, part, columns, ranks.device()) for part in parts]


def _scatter(flat: np.ndarray, microbatches: list[MicroBatch], outputs: list[np.ndarray]) -> None:
    for microbatch, output in zip(microbatches, outputs, strict=True):
        flat[microbatch.which] = output
