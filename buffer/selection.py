"""Which of the claimable trajectories a learner step takes, when neither oldest nor freshest first will do.

The order is one of three independent pieces, as in Reverb (arXiv 2102.04736): the limiter is the staleness bound at
admission and claim, the selector is here, the remover is eviction (stale, or used max_uses times).
"""

import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import BadOrder


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group (or a single rollout) that is ready to be claimed."""

    group: str
    source: str
    oldest_version: int
    reward: float
    """Mean over its members."""
    tokens: int
    """Of all its members."""
    uses: int
    """Learner steps that have used it."""
    waiting_seconds: float


Weight = Callable[[Candidate], float]


def load_weight(order: str) -> Weight | None:
    """The function that `order` names, None for an order that Redis knows. Raises BadOrder."""
    if order in ("oldest", "freshest"):
        return None
    module, _, name = order.partition(":")
    try:
        weight = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadOrder(f"buffer.order={order}: {error}") from error
    if not callable(weight):
        raise BadOrder(f"buffer.order={order} is {type(weight).__name__}, not a function of a Candidate")
    return weight


def sample(candidates: Sequence[Candidate], n: int, weight: Weight, seed: str) -> list[str]:
    """Up to `n` groups, drawn without replacement in proportion to their weights (A-Res; Efraimidis, Spirakis 2006).

    The same seed and candidates give the same groups. Raises BadOrder for a weight that is negative or not finite.
    """
    rng = random.Random(seed)
    keyed = []
    for candidate in candidates:
        value = weight(candidate)
        if not (math.isfinite(value) and value >= 0):
            raise BadOrder(f"the weight of {candidate} is {value}: it must be finite and not negative")
        if value > 0:
            keyed.append((math.log(1.0 - rng.random()) / value, candidate.group))
    return [group for _, group in sorted(keyed, reverse=True)[:n]]
