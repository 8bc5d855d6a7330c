"""The policy that the policy stage began with, frozen: what a KL penalty holds the policy near.

Invariant: it never changes in the life of a run. It is written once, before the first policy step, as a Hugging Face
directory {run_dir}/reference, and read from there by every process that goes on.
"""

from dataclasses import replace

import numpy as np
import torch

from . import policy, ranks
from .estimates import which
from .model import Policy
from .optimization import Evaluator
from .packing import Batch
from .publish import write
from .run import Run
from .settings import LearnerSettings


class Reference:
    """Reference(run).look(batch); holds a model of its own only where the settings use one."""

    def __init__(self, run: Run):
        self._settings = run.settings
        self._model: Evaluator | None = None
        if run.settings.uses_reference:
            folder = run.config.run_dir / "reference"
            if not ranks.agree(folder.exists()):
                write(run.policy.model, run.config.model, folder)
            self._model = Evaluator(Policy(folder, run.policy.model.config.params_dtype))

    def look(self, batch: Batch) -> np.ndarray | None:
        """Its log-probability of each action, float32[K]; None where nothing is compared with it."""
        return None if self._model is None else policy.look(self._model, batch, self._settings)


def penalise(batch: Batch, reference: np.ndarray | None, settings: LearnerSettings) -> Batch:
    """The batch with the KL penalties taken off the rewards, of the task sources that have theirs there.

    They are for the policy that sampled (mu), whose divergence is their mean over its own samples.
    """
    if reference is None:
        return batch
    rewards, own = batch.rewards.copy(), which(batch, settings)[batch.sequence]
    for index, method in enumerate(settings.methods):
        kl = method.objective.kl
        if kl is not None and kl.place == "reward":
            mine = own == index
            rewards[mine] -= kl.penalty(torch.from_numpy(batch.mu[mine]), torch.from_numpy(reference[mine])).numpy()
    return replace(batch, rewards=rewards)
