"""Importance sampling straight against the engine: no old policy, no clipping, a mask on both sides."""

from ..ratios import Tensor, ratio


def dis(theta: Tensor, mu: Tensor, advantage: Tensor, *, low: float = 0.8, high: float = 3.0) -> tuple[Tensor, Tensor]:
    """Direct double-sided importance sampling (GLM-5, arXiv 2602.15763, eq. 3-5): -f(R) A theta.

    R = exp(theta - mu), f(x) = stop_gradient(x) where 1 - low < x < 1 + high, else 0. SAO (arXiv 2607.07508) uses 0.8
    and 3 for coding, 0.3 and 5 for mathematics.
    """
    weight = ratio((theta - mu).detach())
    kept = (weight > 1 - low) & (weight < 1 + high)
    return -weight.where(kept, 0.0) * advantage * theta.where(kept, 0.0), kept  # 0 * -inf would be nan
