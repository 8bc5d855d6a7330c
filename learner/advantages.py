"""Generalised advantage estimation over action tokens.

Invariant: the recursion of an episode runs over its action tokens in the order they were sampled, across turns (tool
output is skipped: "skip-observation", SAO, arXiv 2607.07508) and across context windows (CompactionRL, arXiv
2607.05378). No episode's value reaches another's advantage. Computed in float64.

An advantage of your own is a function that asks, by the names of its arguments, for `rewards`, `values` (then a critic
is trained), `bootstrap` and `boundaries` as `gae` does and returns one number per action; or for `scores`, `groups` and
`attempts` as a baseline does (`baselines`).
"""

import numpy as np

# Length-adaptive lambda, 1 - 1 / (ALPHA * l): SAO, after VAPO (arXiv 2504.05118).
ALPHA = 1.5


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap: np.ndarray,
    boundaries: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float | np.ndarray = 1.0,
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


def adaptive_lambda(lengths: np.ndarray) -> np.ndarray:
    """1 - 1 / (1.5 l) for episodes of l actions: the longer, the further a reward reaches."""
    return 1.0 - 1.0 / (ALPHA * np.maximum(lengths, 1))
