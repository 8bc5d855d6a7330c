"""The supervised stage: imitate the sampled tokens of an archive of trajectories.

Invariant: step s draws its batch from (seed, s) alone, so an interrupted stage continues with the batches it would have
seen. Nothing of the buffer is touched; the first version is published when the stage is over.
"""

import math
from typing import Any

import numpy as np
import torch

from ..buffer import read_archive
from . import ranks
from .packing import Batch, MicroBatch, flatten, gather, plan
from .run import Run
from .settings import SupervisedSettings

FLOOR = 0.05  # the cosine ends at this fraction of the peak


def imitate(run: Run) -> bool:
    """Runs the stage from where it is. Returns whether it is finished (or else was interrupted)."""
    settings, progress = run.settings.supervised, run.progress
    if settings is None:
        return True
    archive = flatten([archived.trajectory for archived in read_archive(settings.data)])
    if not len(archive.actions):
        raise ValueError(f"{settings.data} holds no sampled token to imitate")
    while progress.step < settings.steps:
        if run.stopping():
            return False
        microbatches = _draw(run, archive, settings.batch_size)
        rate = learning_rate(settings, progress.step)
        update = run.policy.update(microbatches, cross_entropy, lr=rate)
        run.guard(update)
        tokens = ranks.total(np.array([sum(batch.tokens.numel() for batch in microbatches)], np.float64))[0]
        run.record(steps=settings.steps, loss=update.loss, grad_norm=update.grad_norm, lr=rate, tokens=int(tokens))
    return True


def _draw(run: Run, archive: Batch, size: int) -> list[MicroBatch]:
    """This rank's share of a random batch of the archive."""
    count = len(archive.trajectories)
    generator = np.random.default_rng([run.settings.seed, run.progress.step])
    episodes = generator.choice(count, min(size, count), replace=False).tolist()
    parts = plan(archive, run.settings.tokens_per_microbatch, ranks.shard(episodes))
    return [gather(archive, part, {}, ranks.device()) for part in parts]


def cross_entropy(batch: MicroBatch, output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Minus the log-probability of the sampled tokens, summed; in nats."""
    return -output[0].sum(), []


def learning_rate(settings: SupervisedSettings, step: int) -> float:
    """Linear warm-up, then a cosine from the peak down to a twentieth of it at the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    fraction = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fraction)))
