"""From rewards and values to advantages, over action tokens only.

Invariant: the recursion of an episode runs over its action tokens in the order they were sampled, across turns (tool
output is skipped: "skip-observation", SAO, arXiv 2607.07508) and across context windows (CompactionRL, arXiv
2607.05378). No episode's value reaches another's advantage. Computed in float64.
"""

from dataclasses import dataclass

import numpy as np

from . import ranks
from .packing import Batch
from .settings import AdvantageSettings

# Length-adaptive lambda, 1 - 1 / (ALPHA * l): SAO, after VAPO (arXiv 2504.05118).
ALPHA = 1.5
# Advantages spread less than this (standard deviation, in units of reward) carry no signal: dividing by it, or feeding
# it to an optimizer that normalises by the gradient's own size, would turn rounding noise into a full-sized step.
MIN_SPREAD = 1e-3


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap: np.ndarray,
    boundaries: np.ndarray,
    gamma: float,
    lam: float | np.ndarray,
) -> np.ndarray:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), float64[K].

    delta_k = r_k + gamma V_{k+1} - V_k and A_k = delta_k + gamma lambda A_{k+1}, where the V after an episode's last
    action is its `bootstrap` and the A after it is 0. A + V are the critic's targets for the same lambda.

    Args:
        rewards: [K] earned by each action.
        values: [K] the critic before each action.
        bootstrap: [episodes] value of what follows the last action; 0 for a terminated episode.
        boundaries: int64[episodes + 1] where each episode begins among the K actions (an episode may have none).
        gamma: discount per action.
        lam: one lambda, or one per episode.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    lengths = np.diff(boundaries)
    lam = np.broadcast_to(np.asarray(lam, np.float64), lengths.shape)
    advantages = np.zeros_like(values)
    following_value, following_advantage = np.array(bootstrap, np.float64), np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):  # all episodes at once, last action first
        alive = np.flatnonzero(lengths >= back)
        at = boundaries[alive + 1] - back
        delta = rewards[at] + gamma * following_value[alive] - values[at]
        following_advantage[alive] = delta + gamma * lam[alive] * following_advantage[alive]
        advantages[at], following_value[alive] = following_advantage[alive], values[at]
    return advantages


@dataclass(frozen=True)
class Estimate:
    """What a batch teaches: one entry per action of this rank, moments over the actions of all ranks."""

    advantages: np.ndarray
    """float32[K] for the policy."""
    returns: np.ndarray
    """float32[K], the critic's targets."""
    mean: float
    """Mean of the advantages before whitening."""
    spread: float
    """Standard deviation of the advantages before whitening."""

    @property
    def carries_signal(self) -> bool:
        return self.spread >= MIN_SPREAD


def continues(batch: Batch, settings: AdvantageSettings) -> np.ndarray:
    """bool[episodes]: whether something of value follows the episode's last action (see `bootstrap_truncated`)."""
    unfinished = {"segment", "truncated"} if settings.bootstrap_truncated else {"segment"}
    return np.array([trajectory.status in unfinished for trajectory in batch.trajectories], bool)


def targets(batch: Batch, values: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """The critic's targets, float32[K]. With lambda_critic = 1 they do not depend on the values but for a bootstrap."""
    at_actions = values[batch.actions]
    advantages = gae(
        batch.rewards, at_actions, _bootstrap(batch, values, settings), batch.boundaries, settings.gamma,
        settings.lambda_critic,
    )  # fmt: skip
    return (advantages + at_actions).astype(np.float32)


def estimate(batch: Batch, values: np.ndarray, settings: AdvantageSettings) -> Estimate:
    """Advantages and targets of this rank's actions from the critic's `values`, float32[N] at every position.

    The lambdas of policy and critic are decoupled (VC-PPO, arXiv 2503.01491). Whitening uses the moments of all ranks
    and is left out when the advantages carry no signal.
    """
    lengths = np.diff(batch.boundaries)
    adaptive = 1.0 - 1.0 / (ALPHA * np.maximum(lengths, 1))
    advantages = gae(
        batch.rewards, values[batch.actions], _bootstrap(batch, values, settings), batch.boundaries, settings.gamma,
        adaptive if settings.lambda_policy is None else settings.lambda_policy,
    )  # fmt: skip
    count, mean = ranks.total(np.array([len(advantages), advantages.sum()]))
    mean /= max(count, 1.0)
    spread = float(np.sqrt(ranks.total(np.array([((advantages - mean) ** 2).sum()]))[0] / max(count, 1.0)))
    if settings.whiten and spread >= MIN_SPREAD:
        advantages = (advantages - mean) / spread
    return Estimate(advantages.astype(np.float32), targets(batch, values, settings), float(mean), spread)


def _bootstrap(batch: Batch, values: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    return np.where(continues(batch, settings), values[batch.ends], 0.0)
