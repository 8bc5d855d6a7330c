"""What a batch teaches: the advantage of each action, and the critic's targets.

Invariant: an episode is judged as the settings say for its task source. Moments and group baselines are over all ranks,
so nothing depends on how the batch is spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from . import ranks
from .advantages import adaptive_lambda, gae
from .lookup import signature
from .packing import Batch, flatten, outcome
from .settings import AdvantageSettings, LearnerSettings

# Advantages spread less than this (standard deviation, in units of reward) carry no signal: dividing by it, or feeding
# it to an optimizer that normalises by the gradient's own size, would turn rounding noise into a full-sized step.
MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class Estimate:
    """What a batch teaches: one entry per action of this rank, moments over the actions of all ranks."""

    advantages: np.ndarray
    """float32[K] for the policy."""
    returns: np.ndarray
    """float32[K], the critic's targets; 0 where it has none."""
    mean: float
    """Mean of the advantages before whitening."""
    spread: float
    """Standard deviation of the advantages before whitening."""

    @property
    def carries_signal(self) -> bool:
        return self.spread >= MIN_SPREAD


@dataclass(frozen=True)
class _Share:
    """The episodes of this rank that are judged alike."""

    settings: AdvantageSettings
    batch: Batch
    """These episodes alone."""
    actions: np.ndarray
    """int64, which of the whole batch's actions theirs are."""
    values: np.ndarray
    """The critic before each of these actions."""
    follows: np.ndarray
    """What the critic expects after each episode's last action; 0 where nothing of value follows."""


def which(batch: Batch, settings: LearnerSettings) -> np.ndarray:
    """int64[episodes]: the place among `settings.methods` of how each episode is learned from."""
    return np.array([settings.which(trajectory.task.source) for trajectory in batch.trajectories], np.int64)


def by_critic(batch: Batch, settings: LearnerSettings) -> np.ndarray:
    """bool[episodes]: whose advantages need a critic."""
    return np.array([method.advantage.by_critic for method in settings.methods], bool)[which(batch, settings)]


def continues(batch: Batch, settings: LearnerSettings) -> np.ndarray:
    """bool[episodes]: whether something of value follows the episode's last action (see `bootstrap_truncated`)."""
    cut_off = np.array([method.advantage.bootstrap_truncated for method in settings.methods], bool)
    status = np.array([trajectory.status for trajectory in batch.trajectories], str)
    return (status == "segment") | ((status == "truncated") & cut_off[which(batch, settings)])


def targets(batch: Batch, values: np.ndarray, settings: LearnerSettings) -> np.ndarray:
    """The critic's targets, float32[K]. With lambda_critic = 1 they do not depend on the values but for a bootstrap."""
    returns = np.zeros(len(batch.actions), np.float32)
    for share in _shares(batch, values, settings):
        if share.settings.by_critic:
            gamma, lam = share.settings.gamma, share.settings.lambda_critic
            advantages = gae(
                share.batch.rewards, share.values, share.follows, share.batch.boundaries, gamma=gamma, lam=lam
            )
            returns[share.actions] = advantages + share.values
    return returns


def estimate(batch: Batch, values: np.ndarray, settings: LearnerSettings) -> Estimate:
    """Advantages and targets of this rank's actions from the critic's `values`, float32[N] at every position.

    The lambdas of policy and critic are decoupled (VC-PPO, arXiv 2503.01491). Whitening uses the moments of all ranks
    and is left out when the advantages carry no signal.
    """
    raw, advantages = np.zeros(len(batch.actions)), np.zeros(len(batch.actions), np.float32)
    for share in _shares(batch, values, settings):
        found = (_against_group if share.settings.by_group else _along_episode)(share)
        raw[share.actions] = found
        mean, spread = ranks.moments(found)
        whiten = share.settings.whiten and spread >= MIN_SPREAD
        advantages[share.actions] = (found - mean) / spread if whiten else found
    return Estimate(advantages, targets(batch, values, settings), *ranks.moments(raw))


def _shares(batch: Batch, values: np.ndarray, settings: LearnerSettings) -> Iterator[_Share]:
    """By method, on every rank all of them: some exchange numbers with the other ranks."""
    own, at_actions = which(batch, settings), values[batch.actions]
    follows = np.where(continues(batch, settings), values[batch.ends], 0.0)
    for index, method in enumerate(settings.methods):
        episodes = np.flatnonzero(own == index)
        trajectories = [batch.trajectories[episode] for episode in episodes.tolist()]
        actions = np.flatnonzero(own[batch.sequence] == index)
        alike = len(episodes) == len(own)
        part = batch if alike else replace(flatten(trajectories), rewards=batch.rewards[actions])
        yield _Share(method.advantage, part, actions, at_actions[actions], follows[episodes])


def _along_episode(share: _Share) -> np.ndarray:
    settings, batch = share.settings, share.batch
    given = {
        "rewards": batch.rewards, "values": share.values, "bootstrap": share.follows, "boundaries": batch.boundaries,
    }  # fmt: skip
    if settings.name == "gae":
        fixed = settings.lambda_policy
        lam = adaptive_lambda(np.diff(batch.boundaries)) if fixed is None else fixed
        return gae(**given, gamma=settings.gamma, lam=lam)
    return _call(settings, given)


def _against_group(share: _Share) -> np.ndarray:
    """Each distinct attempt of all ranks is compared once: repeated siblings may fill a group up."""
    trajectories, settings = share.batch.trajectories, share.settings
    for trajectory in trajectories:
        if trajectory.status == "segment":
            raise ValueError(
                f"{trajectory.attempt} is a segment of an episode, and {settings.name} compares whole ones: segments "
                "need an advantage by the critic"
            )
    turns, scores = _by_turn(share.batch) if settings.per_turn else _by_episode(share.batch)
    own = [(t.attempt, t.group, scored) for t, scored in zip(trajectories, scores, strict=True)]
    distinct = sorted({attempt: (attempt, group, scored) for attempt, group, scored in ranks.gather(own)}.values())
    counts = [len(scored) for _, _, scored in distinct]
    _, groups = np.unique([group for _, group, _ in distinct], return_inverse=True)
    found = _call(settings, {
        "scores": np.array([score for _, _, scored in distinct for score in scored], np.float64),
        "groups": np.repeat(groups, counts).astype(np.int64),
        "attempts": np.repeat(np.arange(len(distinct)), counts),
    })  # fmt: skip
    from_turn_on = {  # an action has a part in all that its turn and the later ones earned
        attempt: found[end - count : end][::-1].cumsum()[::-1]
        for (attempt, _, _), count, end in zip(distinct, counts, np.cumsum(counts), strict=True)
    }
    earned = [from_turn_on[t.attempt][turn] for t, turn in zip(trajectories, turns, strict=True)]
    return np.concatenate([np.zeros(0), *earned])


def _by_episode(batch: Batch) -> tuple[list[np.ndarray], list[list[float]]]:
    """By episode: (the turn of each action, what each turn earned), with the whole episode as its one turn."""
    turns, scores = [], []
    for trajectory, (a, b) in zip(batch.trajectories, pairwise(batch.boundaries), strict=True):
        turns.append(np.zeros(b - a, np.int64))
        scores.append([float(batch.rewards[a:b].sum()) if b > a else outcome(trajectory)])
    return turns, scores


def _by_turn(batch: Batch) -> tuple[list[np.ndarray], list[list[float]]]:
    """By episode: (the turn of each action, what each turn earned)."""
    begins = np.diff(batch.actions, prepend=-2) > 1  # between two turns, or traces, a position is no action
    turns = [np.cumsum(begins[a:b]) - 1 for a, b in pairwise(batch.boundaries)]
    spans = zip(turns, pairwise(batch.boundaries), strict=True)
    return turns, [np.bincount(turn, batch.rewards[a:b]).tolist() for turn, (a, b) in spans]


def _call(settings: AdvantageSettings, given: dict[str, np.ndarray]) -> np.ndarray:
    function = settings.function
    return function(**{name: given[name] for name in signature(function).asks}, **settings.parameters)
