"""The value stage: teach the critic what the unchanged policy earns, before the policy moves for the first time.

Invariant: the policy's weights and version stay as they are; the claimed episodes are trained on by the critic alone.
The explained variance of a batch is taken before the critic has seen any of it.
"""

import numpy as np

from ..buffer import Trajectory
from . import critic, metrics
from .estimates import targets
from .packing import flatten
from .run import Run
from .settings import ValueSettings


def pretrain(run: Run) -> bool:
    """Runs the stage from where it is. Returns whether it is finished (or else was interrupted).

    After each claimed batch the critic makes a few updates, each on a random batch of everything claimed so far: the
    same episodes are seen many times, but never in the same company. (The pool does not outlive the process.)
    """
    settings, progress = run.settings.value, run.progress
    if settings is None or run.critic is None:  # settings see to it that there is one
        return True
    pool: list[Trajectory] = []
    while progress.step < settings.batches:
        if (claim := run.claim()) is None:
            return False
        fresh = flatten(claim.trajectories)
        values = critic.predict(run.critic, fresh, run.settings)
        returns = targets(fresh, values, run.settings)
        explained = critic.explained_variance(fresh, values, returns, run.settings)
        pool += claim.trajectories
        generator = np.random.default_rng([run.settings.seed, claim.step])
        for _ in range(updates_after(progress.step, settings)):
            chosen = generator.choice(len(pool), len(claim.trajectories), replace=False)
            batch = flatten([pool[index] for index in chosen])
            update = critic.learn(run.critic, batch, run.settings, updates=1).updates[-1]
            run.guard(update, batch=batch.trajectories)
        run.finish(claim)
        run.publish(changed=False)
        run.record(
            steps=settings.batches,
            wait_seconds=claim.wait_seconds,
            version=progress.version,
            explained_variance=explained,
            critic_loss=update.loss,
            critic_grad_norm=update.grad_norm,
            **metrics.staleness(fresh, claim.age),
            **metrics.contents(fresh),
        )
    return True


def updates_after(batch: int, settings: ValueSettings) -> int:
    """Updates after the batch of this index, rising with the pool: a pool of few episodes would be learned by heart."""
    done, total = batch * (batch + 1), settings.batches * (settings.batches + 1)
    begun, ended = (settings.batches * settings.updates * part // total for part in (done, done + 2 * (batch + 1)))
    return max(1, ended - begun)
