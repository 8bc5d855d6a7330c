"""Policy objectives: pure functions from log-probabilities and advantages to a loss per action, to be minimised.

A function asks for what it needs by the names of its arguments; each is one number per action, float[A], in nats at the
temperature of sampling:

    theta      log-probability of the action now, with gradient
    old        the same when the batch was claimed (or the engine's, where the recipe says `old: engine`)
    mu         the same at the engine that sampled it
    advantage  how much better than expected the action was
    drift      mean of theta - old over all actions of the action's episode, as it is before the update
    mismatch   mean of old - mu over all actions of the episode
    length     how many these are
    entropy    of the distribution the action was drawn from, with gradient
    reference  log-probability of the action under the policy that the policy stage began with

Keyword-only arguments are settings. It returns (loss, kept): kept is False where a ratio left its range; the share of
those is a health sign of the run.

A new objective is a function of this shape in any module: a recipe names it as `package.module:function`, and nothing
here changes. How losses are averaged is not its business (`aggregation`), nor is the engine's mismatch (`corrections`)
unless it asks for mu.
"""

from collections.abc import Callable
from typing import Any

from .cispo import cispo
from .dis import dis
from .gspo import gspo
from .kl import k1, k2, k3
from .ppo import decoupled_ppo, ppo
from .value import value_loss

__all__ = ["BY_NAME", "SEQUENCE_MEAN", "cispo", "decoupled_ppo", "dis", "gspo", "k1", "k2", "k3", "ppo", "value_loss"]

BY_NAME: dict[str, Callable[..., Any]] = {
    "dis": dis,
    "ppo": ppo,
    "decoupled-ppo": decoupled_ppo,
    "grpo": ppo,  # PPO's loss (arXiv 2402.03300, eq. 3); what differs is where advantages come from and the average
    "gspo": gspo,
    "gspo-token": gspo,
    "cispo": cispo,
}
SEQUENCE_MEAN = {"grpo", "gspo", "gspo-token"}  # defined as a mean over sequences of means over tokens
