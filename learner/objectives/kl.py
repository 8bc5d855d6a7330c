"""Estimates of KL(theta || reference) from the actions that theta took (http://joschu.net/blog/kl-approx.html).

The mean of k1 and of k3 under theta is the divergence, that of k2 nearly; k1 may be negative for one action, k2 and k3
never are. As a penalty on the reward k1 is right: it is unbiased, and no gradient goes through a reward. As a term of
the loss k2 is: its gradient's mean under theta is the divergence's gradient, while that of k1 is zero and that of k3
belongs to the divergence the other way round.
"""

from ..ratios import Tensor, ratio


def k1(theta: Tensor, reference: Tensor) -> Tensor:
    """theta - reference."""
    return theta - reference


def k2(theta: Tensor, reference: Tensor) -> Tensor:
    """(theta - reference)^2 / 2."""
    return 0.5 * (theta - reference) ** 2


def k3(theta: Tensor, reference: Tensor) -> Tensor:
    """exp(reference - theta) - 1 - (reference - theta)."""
    return ratio(reference - theta) - 1 - (reference - theta)
