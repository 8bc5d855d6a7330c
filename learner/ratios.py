"""Ratios of probabilities, the way every objective and correction takes them.

Nothing that a recipe can name imports torch: a recipe is checked against what its functions ask for, also where torch
is not installed. They call the methods of the tensors they are given.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

# float32 overflows at exp(88), and 0 * inf in a gradient is nan. A ratio of 5e8 is outside every range anyway.
MAX_LOG_RATIO = 20.0


def ratio(difference: Tensor) -> Tensor:
    """exp of a difference of log-probabilities; beyond exp(20) constant, so without gradient."""
    return difference.clamp(max=MAX_LOG_RATIO).exp()
