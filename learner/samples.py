"""A few trained trajectories with what the learner thought of each sampled token, for people to read.

Invariant: a value or advantage stands at the token it is about, and only at tokens the policy sampled; elsewhere null.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from . import ranks
from .estimates import Estimate
from .packing import Batch

SHOWN = 8  # trajectories in one file
EVERY = 25  # policy steps between files


def write(run_dir: Path, step: int, last: bool, batch: Batch, values: np.ndarray, estimate: Estimate) -> None:
    """Writes {run_dir}/samples/step-NNNNNN.jsonl for the first two policy steps, every 25th and the last.

    `values` is float32[N], the critic at every position before it learned from the batch.
    """
    if ranks.is_first() and (step <= 2 or step % EVERY == 0 or last):
        path = run_dir / "samples" / f"step-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps(_describe(batch, episode, step, values, estimate)) for episode in _shown(batch)]
        path.write_text("".join(line + "\n" for line in lines))


def _shown(batch: Batch) -> range:
    return range(min(SHOWN, len(batch.trajectories)))


def _describe(batch: Batch, episode: int, step: int, values: np.ndarray, estimate: Estimate) -> dict[str, Any]:
    trajectory = batch.trajectories[episode]
    traces: list[dict[str, Any]] = []
    for index in np.flatnonzero(batch.episode == episode):
        trace = trajectory.traces[len(traces)]
        span = slice(batch.action_starts[index], batch.action_starts[index + 1])
        at = batch.actions[span] + 1 - batch.starts[index]
        traces.append(
            {
                "kind": trace.kind,
                "tokens": trace.tokens.tolist(),
                "sampled": trace.sampled.tolist(),
                "logprobs": _placed(len(trace), at, batch.mu[span]),
                "versions": trace.versions.tolist(),
                "values": _placed(len(trace), at, values[batch.actions[span]]),
                "advantages": _placed(len(trace), at, estimate.advantages[span]),
                "turns": [
                    {"start": turn.start, "end": turn.end, "role": turn.role, "tool": turn.tool} for turn in trace.turns
                ],
            }
        )
    return {
        "id": trajectory.id,
        "task": trajectory.task.id,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "step": step,
        "traces": traces,
    }


def _placed(length: int, at: np.ndarray, values: np.ndarray) -> list[float | None]:
    row: list[float | None] = [None] * length
    for position, value in zip(at.tolist(), values.tolist(), strict=True):
        row[position] = round(value, 5)
    return row
