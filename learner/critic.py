"""The critic's work: values of a batch, and updates towards its returns.

Invariant: the values used for advantages are from before any update on the batch they belong to. Where the targets do
not depend on values (lambda_critic = 1 and nothing to bootstrap) the first update's own forward pass yields them, which
saves a third of the critic's time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from . import metrics, ranks
from .estimates import by_critic, continues, targets
from .objectives import value_loss
from .optimization import Trainee, Update
from .packing import Batch, MicroBatch, gather, plan
from .settings import LearnerSettings


@dataclass(frozen=True)
class CriticStep:
    """What the critic said about a batch, and what learning from it did."""

    values: np.ndarray
    """float32[N], from before the first update; 0 in episodes it does not judge."""
    updates: list[Update]


def learn(critic: Trainee | None, batch: Batch, settings: LearnerSettings, updates: int) -> CriticStep:
    """Makes `updates` critic updates on the episodes that are judged by a critic; none without a critic."""
    values = np.zeros(len(batch.tokens), np.float32)
    if critic is None:
        return CriticStep(values, [])
    clip = settings.critic.value_clip if updates > 1 else None
    plain = clip is None and all(method.advantage.lambda_critic == 1.0 for method in settings.methods)
    known = plain and not (continues(batch, settings) & by_critic(batch, settings)).any()
    if ahead := bool(ranks.total(np.array([not known], np.float64))[0]):  # all ranks take the same path
        values = predict(critic, batch, settings)
    columns = {"returns": targets(batch, values, settings), "before": values[batch.actions]}
    microbatches = _microbatches(batch, settings, columns)
    done = [critic.update(microbatches, partial(_loss, clip)) for _ in range(updates)]
    return CriticStep(values if ahead else _scatter(batch, microbatches, done[0].outputs[0]), done)


def predict(critic: Trainee, batch: Batch, settings: LearnerSettings) -> np.ndarray:
    """The critic's value at every position of the episodes it judges, float32[N]; 0 elsewhere."""

    def alone(microbatch: MicroBatch, values: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return values.sum(), [values]

    microbatches = _microbatches(batch, settings, {})
    return _scatter(batch, microbatches, critic.forward(microbatches, alone)[0])


def explained_variance(
    batch: Batch, values: np.ndarray, returns: np.ndarray, settings: LearnerSettings
) -> float | None:
    """How much of the returns [K] the `values` [N] explain, over the actions of the episodes the critic judges."""
    judged = by_critic(batch, settings)[batch.sequence]
    return metrics.explained_variance(values[batch.actions[judged]], returns[judged])


def _loss(clip: float | None, batch: MicroBatch, values: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    returns, before = batch.columns["returns"], batch.columns["before"]
    return value_loss(values[batch.actions], returns, before, clip).sum(), [values]


def _microbatches(batch: Batch, settings: LearnerSettings, columns: dict[str, np.ndarray]) -> list[MicroBatch]:
    parts = plan(batch, settings.tokens_per_microbatch, np.flatnonzero(by_critic(batch, settings)))
    return [gather(batch, part, columns, ranks.device()) for part in parts]


def _scatter(batch: Batch, microbatches: Iterable[MicroBatch], values: Iterable[np.ndarray]) -> np.ndarray:
    flat = np.zeros(len(batch.tokens), np.float32)
    for microbatch, value in zip(microbatches, values, strict=True):
        flat[microbatch.positions] = value[: len(microbatch.positions)]
    return flat
