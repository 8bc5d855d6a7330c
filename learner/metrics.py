"""What a step tells about itself: one JSON line per step, and alarms that say what they mean and what to do.

Invariant: every number is over the actions (or episodes) of all data-parallel ranks, and all ranks hold the same
numbers, so a decision may rest on them. A number that does not exist (explained variance of equal returns) is None.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import ranks
from .packing import Batch, outcome


@dataclass(frozen=True)
class Alarm:
    """A number that left the range in which learning is known to be healthy."""

    name: str
    value: float
    limit: float
    hint: str


SPAN = 20  # steps in which entropy and reward are compared: half of them with the half before

# (metric, healthy side of the limit, limit, what it means and what to try)
LIMITS: list[tuple[str, str, float, str]] = [
    ("masked_share", "<", 0.2, "the policy left the trusted range within a batch's age: lower policy.lr or eta"),
    (
        "corrected_share",
        "<",
        0.2,
        "engine and learner disagree on many tokens: lower eta, check temperature, precision",
    ),
    ("ess", ">", 0.5, "few tokens carry the update: lower eta, or give engine and learner the same precision"),
    ("mismatch_k3", "<", 0.05, "engine and learner disagree on what was sampled: check temperature, precision, eta"),
    ("entropy_trend", ">", 0.5, "the policy narrows without earning more: lower policy.lr, or add objective.entropy"),
    ("entropy", ">", 0.02, "the policy has all but stopped exploring: lower policy.lr or add objective.entropy"),
    ("explained_variance", ">", -0.1, "the critic is worse than a constant: more value.updates, another critic.lr"),
    ("grad_norm", "<", 20.0, "the gradient is far above its clip: lower policy.lr"),
    ("advantage_std", ">", 0.01, "almost no signal is left: harder tasks, or stop"),
    ("zero_variance_groups", "<", 0.9, "almost no group has both good and bad attempts: mix tasks by difficulty"),
    ("reward_std", ">", 1e-6, "every episode earned the same: harder or easier tasks, or a larger batch"),
]


def alarms(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alarms of a step's record; a metric that is missing or None raises none, one that is not finite always."""
    found = []
    for name, side, limit, hint in LIMITS:
        value = record.get(name)
        if value is not None and not (value < limit if side == "<" else value > limit):
            found.append(asdict(Alarm(name, value, limit, hint)))
    return found


def append(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Adds a line to {run_dir}/metrics.jsonl (the first rank does); numbers that are not finite become null."""
    if ranks.is_first():
        cleaned = {name: _json(value) for name, value in record.items()}
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **cleaned}) + "\n")


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all ranks; 1 is perfect, 0 no better than a constant."""
    _, spread = ranks.moments(returns.astype(np.float64))
    _, left = ranks.moments(returns.astype(np.float64) - values)
    return 1.0 - (left / spread) ** 2 if spread > 1e-6 else None


def engine_mismatch(old: np.ndarray, mu: np.ndarray) -> dict[str, float]:
    """How far the learner's log-probabilities of the sampled actions are from the engine's, before any update.

    mismatch_k1 = mean(mu - old) and mismatch_k3 = mean(rho - 1 - log rho) estimate KL(engine || learner) in nats, with
    rho = exp(old - mu) (http://joschu.net/blog/kl-approx.html); mismatch_max is the largest |old - mu|;
    ess = (sum rho)^2 / (n sum rho^2), 1 when all weights are equal.
    """
    log_rho = old.astype(np.float64) - mu
    rho = np.exp(np.minimum(log_rho, 50.0))
    sums = [len(rho), -log_rho.sum(), (rho - 1 - log_rho).sum(), rho.sum(), (rho**2).sum()]
    count, k1, k3, weight, square = ranks.total(np.array(sums, np.float64))
    count = max(count, 1.0)
    largest = ranks.highest(np.array([np.abs(log_rho).max(initial=0.0)]))[0]
    ess = weight**2 / (count * square) if square else 1.0
    return {"mismatch_k1": k1 / count, "mismatch_k3": k3 / count, "mismatch_max": float(largest), "ess": ess}


def divergence(theta: np.ndarray, reference: np.ndarray) -> float:
    """KL(learner || reference) in nats, estimated by k3 over the sampled actions of all ranks."""
    gap = np.minimum(reference.astype(np.float64) - theta, 50.0)
    return ranks.moments(np.exp(gap) - 1 - gap)[0]


def engine_error(batch: Batch, before: np.ndarray, version: int) -> float | None:
    """Largest |before - mu| over the actions that the weights of `version` sampled, which are those of `before`.

    Engine and learner hold the same weights there, so it is their rounding and nothing else. None without such actions.
    """
    same = np.abs(before.astype(np.float64) - batch.mu)[batch.versions == version]
    largest, count = ranks.highest(np.array([same.max(initial=0.0), len(same)]))
    return float(largest) if count else None


def staleness(batch: Batch, age: Callable[[int], int]) -> dict[str, Any]:
    """Ages, by the version that sampled, of the episodes' oldest tokens and of all sampled tokens: moments, and counts
    by age."""
    oldest = [trajectory.oldest_version for trajectory in batch.trajectories]
    ages = np.array([age(version) for version in oldest if version is not None], np.int64)
    versions, where = np.unique(batch.versions, return_inverse=True)
    by_token = np.array([age(version) for version in versions.tolist()], np.int64)[where]
    largest = int(ranks.highest(np.array([max(ages.max(initial=0), by_token.max(initial=0))], np.float64))[0])
    return {
        "staleness_mean": ranks.moments(ages.astype(np.float64))[0],
        "staleness_max": float(largest),
        "staleness_token_mean": ranks.moments(by_token.astype(np.float64))[0],
        "staleness_episodes": _counts(ages, largest),
        "staleness_tokens": _counts(by_token, largest),
    }


def narrowing(history: Sequence[tuple[float, float]]) -> float | None:
    """What the mean entropy of the newer half of `history` is of the older half's; (entropy, reward) of each step.

    None where the reward has risen meanwhile, as a policy that learns to succeed may well narrow, and before there are
    SPAN steps.
    """
    if len(history) < SPAN:
        return None
    older, newer = (np.mean(half, axis=0) for half in (history[: SPAN // 2], history[SPAN // 2 :]))
    return float(newer[0] / older[0]) if newer[1] <= older[1] and older[0] > 0 else None


def zero_variance_groups(batch: Batch) -> float | None:
    """The share of groups of several distinct attempts that all earned the same; None without such groups."""
    earned: dict[str, dict[str, float]] = {}
    for group, attempt, score in ranks.gather([(t.group, t.attempt, outcome(t)) for t in batch.trajectories]):
        earned.setdefault(group, {})[attempt] = score
    flat = [len(set(scores.values())) == 1 for scores in earned.values() if len(scores) > 1]
    return sum(flat) / len(flat) if flat else None


def contents(batch: Batch) -> dict[str, Any]:
    """Rewards and sizes of a batch; its tokens by who wrote them (sampled, or the role of the message)."""
    rewards = np.array([trajectory.reward for trajectory in batch.trajectories], np.float64)
    mean, spread = ranks.moments(rewards)
    sizes = np.array([len(rewards), len(batch.tokens), len(batch.actions)], np.float64)
    episodes, tokens, sampled = (int(size) for size in ranks.total(sizes))
    by_kind: Counter[str] = Counter(sampled=sampled)
    for role, length in ranks.gather(_unsampled(batch)):
        by_kind[role] += length
    by_kind["template"] = tokens - by_kind.total()
    return {
        "reward": mean, "reward_std": spread, "episodes": episodes, "tokens": tokens, "sampled_tokens": sampled,
        "tokens_by_kind": dict(by_kind),
    }  # fmt: skip


def _unsampled(batch: Batch) -> list[tuple[str, int]]:
    """(role, tokens of it that were not sampled) of this rank's messages, by role."""
    found: Counter[str] = Counter()
    for trajectory in batch.trajectories:
        for trace in trajectory.traces:
            written = np.concatenate([[0], np.cumsum(~trace.sampled)])
            for turn in trace.turns:
                found[turn.role] += int(written[turn.end] - written[turn.start])
    return [(role, length) for role, length in found.items() if length]


def _counts(ages: np.ndarray, largest: int) -> list[int]:
    """How many of all ranks' `ages` are 0, 1, ... `largest`."""
    counts = np.bincount(np.maximum(ages, 0), minlength=largest + 1).astype(np.float64)
    return [int(count) for count in ranks.total(counts)]


def _json(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return round(value, 7) if math.isfinite(value) else None
    return value
