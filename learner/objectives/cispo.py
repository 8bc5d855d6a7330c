"""Clipped importance weights: the weight is bounded, the gradient of every action stays."""

from ..ratios import Tensor, ratio


def cispo(
    theta: Tensor, old: Tensor, advantage: Tensor, *, low: float | None = None, high: float = 4.0
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -stop_gradient(clip(r, 1 - low, 1 + high)) A theta, r = exp(theta - old).

    Without `low`, as in the paper, a weight is bounded above alone. What is not kept has a bounded weight here, and
    still pushes.
    """
    r = ratio((theta - old).detach())
    weight = r.clamp(0.0 if low is None else 1 - low, 1 + high)
    return -weight * advantage * theta.where(weight > 0, 0.0), r == weight  # 0 * -inf would be nan
