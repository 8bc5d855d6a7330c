"""The clipped surrogate and what was made of it."""

from ..ratios import Tensor, ratio


def ppo(
    theta: Tensor, old: Tensor, advantage: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(theta - old).

    low != high is DAPO's asymmetric range (arXiv 2503.14476: 0.2 and 0.28). `dual` bounds the loss of a bad action,
    whose ratio the minimum leaves free: max(min(...), dual A) where A < 0 (dual clip, arXiv 1912.09729: 3).
    """
    r = ratio(theta - old)
    free, clipped = r * advantage, r.clamp(1 - low, 1 + high) * advantage
    gain, kept = free.minimum(clipped), free.detach() <= clipped.detach()
    if dual is not None:
        bounded = (advantage < 0) & (gain.detach() < dual * advantage)
        gain, kept = (dual * advantage).where(bounded, gain), kept & ~bounded
    return -gain, kept


def decoupled_ppo(
    theta: Tensor,
    old: Tensor,
    mu: Tensor,
    advantage: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoupled PPO (AReaL, arXiv 2505.24298): PPO around the proximal policy `old`, weighted by rho = exp(old - mu).

    With the weight capped it is ppo with the correction `tis`.
    """
    loss, kept = ppo(theta, old, advantage, low=low, high=high, dual=dual)
    return loss * ratio(old - mu).detach(), kept
