"""Policy objectives: pure functions from log-probabilities and advantages to a loss per action, to be minimised.

Notation (all float[A], in nats, at the temperature of sampling): theta the learner now, with gradient; mu the engine
that sampled; old the learner when the batch was claimed. Each returns (loss, kept): kept is False where the ratio left
its range, so that such an action pushes nowhere; the share of them is a health sign of the run.

A new objective is a function of this shape; it needs no flag anywhere but its name in the settings.
"""

import torch

# AReaL (arXiv 2505.24298) weighs the clipped loss by exp(old - mu); the cap is truncated importance sampling's.
MAX_STALENESS_WEIGHT = 2.0


def dis(
    theta: torch.Tensor, mu: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct double-sided importance sampling (GLM-5, arXiv 2602.15763, eq. 3-5): -f(R) A theta.

    R = exp(theta - mu), f(x) = stop_gradient(x) where 1 - low < x < 1 + high, else 0. No old policy is needed.
    """
    ratio = torch.exp(theta.detach() - mu)
    kept = (ratio > 1 - low) & (ratio < 1 + high)
    return -torch.where(kept, ratio, 0.0) * advantage * theta, kept


def ppo(
    theta: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate (PPO, arXiv 1707.06347, eq. 7; low != high: DAPO, arXiv 2503.14476).

    -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(theta - old).
    """
    ratio = torch.exp(theta - old)
    clipped = ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(ratio * advantage, clipped), ratio.detach() * advantage <= clipped.detach()


def staleness_weight(old: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """min(exp(old - mu), 2): what decoupled PPO multiplies its loss by when the engine's weights were older."""
    return torch.exp(old - mu).clamp(max=MAX_STALENESS_WEIGHT)


def value_loss(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """0.5 (V - target)^2 per action."""
    return 0.5 * (values - returns) ** 2
