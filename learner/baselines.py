"""Advantages without a critic: what an attempt earned against what its siblings earned.

A baseline is a function of (scores, groups, attempts), one entry per score: float64[n] and two int64[n] that say whose
it is. Scores are what attempts earned as a whole, or each of their turns. It is given every attempt of a group once,
of all ranks: failures of the environment are not in the batch, and an attempt repeated to fill a group up says nothing
new. A group without variance gets 0.
"""

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6  # keeps the division of a nearly constant group finite


def grpo(scores: np.ndarray, groups: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """GRPO (arXiv 2402.03300, sec. 4.1): (R - mean) / (std + eps), the group's population moments."""
    centred = dr_grpo(scores, groups, attempts)
    return centred / (np.sqrt(_mean(centred**2, groups)) + EPSILON)


def dr_grpo(scores: np.ndarray, groups: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """Dr.GRPO (arXiv 2503.20783), and GLM-5 (arXiv 2602.15763): R - mean."""
    return np.where(_constant(scores, groups), 0.0, scores - _mean(scores, groups))


def rloo(scores: np.ndarray, groups: np.ndarray, attempts: np.ndarray) -> np.ndarray:
    """RLOO (arXiv 2402.14740): R - mean of the other attempts; 0 without any."""
    own = np.ones(len(scores))
    others = _sum(own, groups) - _sum(own, attempts)
    mean = (_sum(scores, groups) - _sum(scores, attempts)) / np.maximum(others, 1)
    return np.where(_constant(scores, groups) | (others == 0), 0.0, scores - mean)


def _sum(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The sum of `values` over the entries with the same label, at each entry."""
    return np.bincount(labels, values)[labels] if len(labels) else np.zeros(0)


def _mean(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return _sum(values, labels) / np.maximum(_sum(np.ones(len(values)), labels), 1)


def _constant(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool[n]: whether all scores of the entry's group are equal, which rounding hides from a difference to a mean."""
    lowest = np.full(groups.max(initial=-1) + 1, np.inf)
    np.minimum.at(lowest, groups, scores)
    return _sum((scores != lowest[groups]).astype(np.float64), groups) == 0


BY_NAME: dict[str, Callable[..., np.ndarray]] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}
