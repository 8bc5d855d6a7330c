"""Demonstrations for the cold start: `python -m argosy.actors demonstrate CONFIG.json --episodes N --out FILE`.

Invariant: a scripted expert speaks through the same episode loop, transcript and environment as a model does, so what
is learned from is token for token what the model will see. Its tokens are marked sampled, by version 0, with
log-probability 0. Needs neither engine nor Redis.
"""

import asyncio
import inspect
import random
from pathlib import Path
from typing import Any

from ..buffer import Task, Trajectory, write_archive
from ..envs import ToolEnv, close_shared_pools, make_env
from .chat import Chat
from .engine import Generation
from .episode import Policy, Unleased, run_episode, to_trajectory
from .settings import ActorConfig, Mixture
from .transcript import Transcript


async def demonstrate(config: ActorConfig, episodes: int) -> list[Trajectory]:
    """Plays the first `episodes` tasks of the mixture with each environment's own expert, seeded by the task."""
    chat = Chat(config.model)
    mixture = Mixture(config.sources)
    places = asyncio.Semaphore(config.actor.concurrency)

    async def play(task: Task) -> Trajectory:
        source = mixture.sources[task.source]
        async with places:
            env = make_env(source.env, **source.kwargs)
            transcript = Transcript(chat, env.tool_schemas())
            policy = _expert_policy(env, chat, random.Random(task.id))
            try:
                outcome = await run_episode(env, task.seed, policy, transcript, config.actor)
            finally:
                await env.stop()
            lease = Unleased(f"demonstration/{task.id}", task)
            return to_trajectory(outcome, transcript.traces(), lease, source, config.actor, "expert")

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(mixture(index))) for index in range(episodes)]
    finally:
        await close_shared_pools()
    return [task.result() for task in tasks]


def _expert_policy(env: ToolEnv, chat: Chat, rng: random.Random) -> Policy:
    """The environment's expert as a policy; it is asked for once the episode has begun, and so knows its task."""
    say = None

    async def answer(transcript: Transcript, seconds: float) -> Generation:
        nonlocal say
        if say is None:
            say = await _resolve(env.expert(rng))
        ids = [*chat.encode(await _resolve(say(list(transcript.messages)))), chat.stop_id]
        return Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop")

    return answer


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def main(config: ActorConfig, episodes: int, out: Path) -> None:
    trajectories = await demonstrate(config, episodes)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_archive(out, trajectories)
