"""How far engine and learner disagree about real rollouts of one model, and what each correction would make of it.

    python -m argosy.learner.mismatch CONFIG.json ARCHIVES OUT.json        (with torchrun where there are several ranks)

ARCHIVES is a file or folder of trajectories that an engine sampled with the weights of the configured model. Nothing is
trained: both sides hold the same weights, so the difference is that of precision, kernels and templates. Staleness will
come on top of it.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..buffer import Trajectory, read_archive
from . import corrections, objectives, ranks
from .aggregation import sequence_mean
from .lookup import signature
from .model import Policy
from .optimization import Trainee
from .packing import Batch, flatten
from .policy import look
from .run import LearnerConfig

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
WORST = 8
CONTEXT = 12  # tokens shown before each of the worst


def examine(trajectories: Sequence[Trajectory], old: np.ndarray) -> dict[str, Any]:
    """Numbers about the difference d = learner - engine of the log-probabilities of all sampled tokens, in nats.

    Args:
        trajectories: the rollouts.
        old: float32[K], the learner's log-probability of each sampled token, in order.
    """
    batch = flatten(trajectories)
    if not len(old):
        raise ValueError("no token was sampled in these rollouts")
    difference = old.astype(np.float64) - batch.mu
    size, rho = np.abs(difference), np.exp(difference)
    whole = np.bincount(batch.sequence, difference, len(trajectories))
    return {
        "tokens": len(old),
        "episodes": len(trajectories),
        "bias": float(difference.mean()),
        "mismatch_k3": float((rho - 1 - difference).mean()),
        "ess": float(rho.sum() ** 2 / (len(rho) * (rho**2).sum())),
        "quantiles": {str(q): float(np.quantile(size, q)) for q in QUANTILES},
        "episode_ratio": {str(q): float(np.exp(np.quantile(whole, q))) for q in (0.01, 0.5, 0.99)},
        "histogram": _histogram(size),
        "touched": _touched(batch, old),
        "worst": [_describe(batch, old, action) for action in np.argsort(-size)[:WORST].tolist()],
    }


def _touched(batch: Batch, old: np.ndarray) -> dict[str, float]:
    """The share of tokens that each correction, or objective that corrects by itself, would mask, cap or clip."""
    columns = {
        "theta": old, "old": old, "mu": batch.mu, "mismatch": sequence_mean(old - batch.mu, batch.sequence),
        "length": batch.lengths[batch.sequence], "advantage": np.ones(len(old)),
    }  # fmt: skip
    given = {name: torch.from_numpy(np.asarray(column, np.float64)) for name, column in columns.items()}
    given["drift"] = given["mismatch"]  # gspo to the engine's policy, as `old: engine` has it
    rho = (given["old"] - given["mu"]).exp()

    def share(found: torch.Tensor) -> float:
        return float(found.double().mean())

    weights = {name: _call(function, given) for name, function in corrections.BY_NAME.items() if function}
    kept = {name: _call(objectives.BY_NAME[name], given)[1] for name in ("dis", "gspo")}
    return {
        "icepop": share(weights["icepop"] == 0),
        "tis": share(weights["tis"] < rho),
        "sequence-mask": share(weights["sequence-mask"] == 0),
        "sequence-tis": share(weights["sequence-tis"] < (given["mismatch"] * given["length"]).exp()),
        "dis": share(~kept["dis"]),
        "gspo, old: engine": share(~kept["gspo"]),
    }


def _call(function: Any, given: Mapping[str, torch.Tensor]) -> Any:
    return function(**{name: given[name] for name in signature(function).asks})


def _histogram(size: np.ndarray) -> dict[str, int]:
    """Tokens by decade of |d|: {"1e-05": 12, ...} counts those above that and below ten times it."""
    decades = np.floor(np.log10(np.maximum(size, 1e-9))).astype(int)
    found, counts = np.unique(decades, return_counts=True)
    return {f"1e{decade:+03d}": int(count) for decade, count in zip(found, counts, strict=True)}


def _describe(batch: Batch, old: np.ndarray, action: int) -> dict[str, Any]:
    position = int(batch.actions[action])
    trace = int(np.searchsorted(batch.starts, position, side="right")) - 1
    begin = max(int(batch.starts[trace]), position + 1 - CONTEXT)
    return {
        "trajectory": batch.trajectories[int(batch.sequence[action])].id,
        "position": position + 1 - int(batch.starts[trace]),
        "token": int(batch.targets[action]),
        "context": batch.tokens[begin : position + 1].tolist(),
        "engine": float(batch.mu[action]),
        "learner": float(old[action]),
    }


def main(config_file: str, archives: str, out: str) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = LearnerConfig.model_validate_json(Path(config_file).read_text())
    settings = config.learner
    ranks.start(settings.parallel, settings.seed)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    policy = Trainee(Policy(config.model, dtype), settings.policy)
    every = [archived.trajectory for archived in read_archive(archives)]
    mine = ranks.shard(list(range(len(every))))
    batch = flatten([every[index] for index in mine])
    seen = np.split(look(policy, batch, settings), batch.boundaries[1:-1])
    by_index = dict(ranks.gather(list(zip(mine, seen, strict=True))))
    found = examine(every, np.concatenate([by_index[index] for index in range(len(every))]))
    if ranks.is_first():
        Path(out).write_text(json.dumps(found, indent=2))
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as in __main__.py
