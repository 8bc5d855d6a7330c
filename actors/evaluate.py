"""Held-out evaluation: `python -m argosy.actors evaluate CONFIG.json --source NAME --episodes N --out FILE.json`.

Invariant: seeds are 0 to N - 1, so two evaluations of a source see the same tasks, and the buffer has no part in it, so
nothing of it can be trained on. An episode that fails for a reason that is not the agent's is played again; if that
happens three times the evaluation fails, because leaving it out would change what is measured.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from ..buffer import Task, Trajectory, WeightLedger, write_archive
from ..envs import InfrastructureError, close_shared_pools, make_env
from .chat import Chat
from .engine import Engine
from .episode import Outcome, Unleased, engine_policy, run_episode, to_trajectory
from .errors import ActorError
from .settings import ActorConfig, TaskSource
from .transcript import Transcript

log = logging.getLogger(__name__)

TRANSCRIPTS = 16  # kept in the report


async def evaluate(config: ActorConfig, source: TaskSource, episodes: int) -> list[tuple[Outcome, Trajectory]]:
    """Plays the first `episodes` seeds of a source with whatever weights the engines serve."""
    chat = Chat(config.model)
    places = asyncio.Semaphore(config.actor.concurrency)

    async def play(engine: Engine, seed: int, tries: int = 3) -> tuple[Outcome, Trajectory]:
        lease = Unleased(f"{config.name}/{source.name}/{seed}", Task(f"{source.name}/{seed}", source.name, seed))
        env = make_env(source.env, **source.kwargs)
        transcript = Transcript(chat, env.tool_schemas())
        policy = engine_policy(engine, chat, config.actor, lease.attempt)
        try:
            outcome = await run_episode(env, seed, policy, transcript, config.actor)
        except InfrastructureError as error:
            if tries == 1:
                raise
            log.warning("%s is played again: %s", lease.attempt, error)
            return await play(engine, seed, tries - 1)
        finally:
            await env.stop()
        return outcome, to_trajectory(outcome, transcript.traces(), lease, source, config.actor, config.name)

    async def wait_and_play(engine: Engine, seed: int) -> tuple[Outcome, Trajectory]:
        async with places:
            return await play(engine, seed)

    ledger = WeightLedger(config.buffer)
    try:
        async with Engine(ledger, chat.vocab_size, config.actor.patience_seconds) as engine:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(wait_and_play(engine, seed)) for seed in range(episodes)]
    finally:
        await close_shared_pools()
    return [task.result() for task in tasks]


def summary(played: list[tuple[Outcome, Trajectory]]) -> dict[str, Any]:
    outcomes = [outcome for outcome, _ in played]
    n = len(played)
    turns = sum(outcome.turns for outcome in outcomes)
    return {
        "episodes": n,
        "success": sum(outcome.reward >= 1.0 for outcome in outcomes) / n,
        "mean_reward": sum(outcome.reward for outcome in outcomes) / n,
        "version": max(int(trace.versions.max()) for _, trajectory in played for trace in trajectory.traces),
        "turns": turns / n,
        "invalid": sum(outcome.malformed for outcome in outcomes) / max(turns, 1),
        "transcripts": [as_record(trajectory) for _, trajectory in played[:TRANSCRIPTS]],
    }


def as_record(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON, for people and reports; the buffer's codec is the format to keep."""
    return {
        "id": trajectory.id,
        "task": trajectory.task.id,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "traces": [
            {
                "tokens": trace.tokens.tolist(),
                "sampled": trace.sampled.astype(int).tolist(),
                "logprobs": trace.logprobs.round(4).tolist(),
                "versions": trace.versions.tolist(),
                "turns": [
                    {"start": t.start, "end": t.end, "role": t.role, "tool": t.tool, "seconds": t.seconds}
                    for t in trace.turns
                ],
            }
            for trace in trajectory.traces
        ],
    }


def find_source(config: ActorConfig, name: str) -> TaskSource:
    for source in (*config.evaluation, *config.sources):
        if source.name == name:
            return source
    raise ActorError(
        f"no source {name!r}; there are {[source.name for source in (*config.evaluation, *config.sources)]}"
    )


async def main(config: ActorConfig, source: str, episodes: int, out: Path, archive: Path | None = None) -> None:
    """Writes the summary to `out`, and the trajectories to `archive` if that is asked for."""
    played = await evaluate(config, find_source(config, source), episodes)
    result = summary(played)
    out.parent.mkdir(parents=True, exist_ok=True)
    if archive is not None:
        write_archive(archive, [trajectory for _, trajectory in played])
    part = out.with_name(f".{out.name}.part")  # whoever finds the result finds all of it
    part.write_text(json.dumps(result))
    part.replace(out)
