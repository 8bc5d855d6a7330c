"""The critic's loss."""

from ..ratios import Tensor


def value_loss(values: Tensor, returns: Tensor, before: Tensor | None = None, clip: float | None = None) -> Tensor:
    """0.5 (V - target)^2 per action; with `clip` the larger of that and the same for V held within `clip` of `before`.

    The clipped form (PPO's code, arXiv 2005.12729, sec. 3) stops a value that has moved `clip` towards its target.
    """
    loss = 0.5 * (values - returns) ** 2
    if clip is None:
        return loss
    assert before is not None
    held = before + (values - before).clamp(-clip, clip)
    return loss.maximum(0.5 * (held - returns) ** 2)
