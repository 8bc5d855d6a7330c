"""The loss of each action under the method of its own task source.

Invariant: an action's loss is that of its method alone; neither the other actions of a micro-batch nor their methods
have any part in it.
"""

from collections.abc import Mapping, Sequence

import torch

from .settings import Method


def losses(
    methods: Sequence[Method], columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (loss, kept by the objective, weight by the correction), float32[A] each.

    `columns` are what functions ask for by name (see `objectives`), and `method`: which of `methods` an action is
    learned by.
    """
    if len(methods) == 1:
        return _of(methods[0], columns)
    own = [torch.nonzero(columns["method"] == index)[:, 0] for index in range(len(methods))]
    parts = [
        _of(method, {name: column[which] for name, column in columns.items()})
        for method, which in zip(methods, own, strict=True)
    ]
    back = torch.cat(own).argsort()
    loss, kept, weight = (torch.cat(column)[back] for column in zip(*parts, strict=True))
    return loss, kept, weight


def _of(method: Method, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    objective, correction = method.objective, method.correction
    given = {**columns, "old": columns["mu"]} if objective.old == "engine" else columns
    loss, kept = objective.function(**{name: given[name] for name in objective.asks}, **objective.arguments)
    weight = torch.ones_like(loss.detach())
    if correction.function is not None:
        weight = correction.function(**{name: given[name] for name in correction.asks}, **correction.arguments)
        loss = loss * weight
    if objective.kl is not None and objective.kl.place == "loss":
        loss = loss + objective.kl.penalty(columns["theta"], columns["reference"])
    if objective.entropy:
        loss = loss - objective.entropy * columns["entropy"]
    return loss, kept, weight
