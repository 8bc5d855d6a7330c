"""How the losses of actions become one number.

Invariant: an action's weight depends on global counts alone (of all ranks and micro-batches of an update), so the sum
of weight x loss, and its gradient, is the same however the batch is cut. Masked actions count; observations never do.
"""

from typing import Literal

import numpy as np

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_mean(lengths: np.ndarray, actions: float) -> np.ndarray:
    """Every action alike: 1 / `actions`, their number in all sequences."""
    return np.full(len(lengths), 1.0 / actions)


def seq_mean_token_mean(lengths: np.ndarray, sequences: float) -> np.ndarray:
    """Every sequence alike, and every action within it (GRPO, arXiv 2402.03300, eq. 3)."""
    return 1.0 / (np.maximum(lengths, 1) * sequences)


def seq_mean_token_sum_norm(lengths: np.ndarray, sequences: float, constant: float) -> np.ndarray:
    """Every action alike, by a `constant` and the number of sequences (Dr.GRPO, arXiv 2503.20783): no length bias."""
    return np.full(len(lengths), 1.0 / (constant * sequences))


def sequence_mean(values: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """The mean of `values` [K] over the actions of the same sequence (int64[K]), at each action; float64[K]."""
    if not len(values):
        return np.zeros(0)
    return (np.bincount(sequence, values) / np.maximum(np.bincount(sequence), 1))[sequence]
