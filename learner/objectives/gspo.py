"""One ratio for a whole sequence.

The gradient of a function of s = exp(mean_t(theta_t - old_t)) with respect to theta_t is that function's derivative in
s, times s, over the length: beyond the number s itself nothing of the other tokens is in it. So s (as `drift`, its
logarithm) is taken from a forward pass before the update, and the gradient is exact however the traces of an episode
are spread over micro-batches; an episode of several context windows need not fit into one.
"""

from ..ratios import Tensor, ratio


def gspo(
    theta: Tensor, drift: Tensor, advantage: Tensor, *, low: float = 3e-4, high: float = 4e-4
) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071, sec. 4.1): -min(s A, clip(s, 1 - low, 1 + high) A), mean over sequences.

    Written per token, s_t = stop_gradient(s) exp(theta_t - stop_gradient(theta_t)), which is GSPO-token (sec. 4.3).
    Its mean over the tokens of a sequence is GSPO, in value and gradient, where all of them have the same advantage.
    """
    one = ratio((theta - theta.detach()).nan_to_num())  # a token of probability 0 has no gradient
    s = ratio(drift) * one
    free, clipped = s * advantage, s.clamp(1 - low, 1 + high) * advantage
    return -free.minimum(clipped), free.detach() <= clipped.detach()
