"""What the engine's probabilities differ from the learner's, made up for: a weight per action, without gradient.

A correction multiplies the loss of any objective that does not ask for mu itself. It asks for what it needs as
objectives do: `old`, `mu`, and over the action's episode `mismatch` (the mean of old - mu) and `length`. With
rho = exp(old - mu), a weight of 0 masks the action; it still counts where losses are averaged.
"""

from collections.abc import Callable

from .ratios import Tensor, ratio


def icepop(old: Tensor, mu: Tensor, *, low: float = 0.5, high: float = 2.0) -> Tensor:
    """IcePop: rho where low <= rho <= high, else 0.

    GLM-5 (arXiv 2602.15763, eq. 1) has [1 / beta, beta] with beta = 2, IcePop's authors 0.5 and 5.
    """
    rho = ratio((old - mu).detach())
    return rho.where((rho >= low) & (rho <= high), 0.0)


def tis(old: Tensor, mu: Tensor, *, high: float = 2.0) -> Tensor:
    """Truncated importance sampling: min(rho, high)."""
    return ratio((old - mu).detach()).clamp(max=high)


def sequence_mask(mismatch: Tensor, *, low: float = 0.999, high: float = 1.002) -> Tensor:
    """Masked importance sampling: 1 where the geometric mean of an episode's rho is in [low, high], else 0."""
    mean = ratio(mismatch.detach())
    return ((mean >= low) & (mean <= high)).to(mean.dtype)


def sequence_tis(mismatch: Tensor, length: Tensor, *, high: float = 2.0) -> Tensor:
    """Truncated importance sampling of whole episodes: min(product of an episode's rho, high)."""
    return ratio((mismatch * length).detach()).clamp(max=high)


BY_NAME: dict[str, Callable[..., Tensor] | None] = {
    "off": None,
    "icepop": icepop,
    "tis": tis,
    "sequence-mask": sequence_mask,
    "sequence-tis": sequence_tis,
}
