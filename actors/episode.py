"""One episode: policy, transcript and environment take turns until one of them, or a limit, ends it.

Invariant: an `Outcome` is a graded, valid episode. What the agent does wrong (a malformed call, code that crashes, too
many turns, tokens or seconds) is in its grade; whatever else goes wrong is an exception and never a reward of 0.
It waits for the policy and for the environment, each within the episode's deadline, and then for the grade.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..buffer import Lease, Task, Trajectory
from ..envs import InfrastructureError, ToolEnv
from .chat import Chat
from .engine import Engine, Generation
from .errors import EngineRefused, OutOfTime
from .settings import ActorSettings, TaskSource
from .tool_calls import parse
from .transcript import Transcript

T = TypeVar("T")

Policy = Callable[[Transcript, float], Awaitable[Generation]]
"""Continues the transcript within so many seconds (OutOfTime if it cannot)."""


@dataclass
class Outcome:
    """What came of an episode, beside its transcript."""

    ended: bool = False
    """Whether the environment ended the episode, rather than a limit."""
    reward: float = 0.0
    """The grade; what single turns earned stands in the traces."""
    parts: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    malformed: int = 0
    """Messages whose tool calls could not be read."""
    prefilled: int = 0
    """Prompt tokens the engine computed because its prefix cache did not have them."""
    engine: str = ""
    timing: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "engine": 0.0, "env": 0.0, "grade": 0.0, "waited": 0.0}
    )
    """Seconds. `waited` went by without an engine and does not count against the deadline."""


async def run_episode(
    env: ToolEnv,
    seed: int,
    policy: Policy,
    transcript: Transcript,
    settings: ActorSettings,
    after_turn: Callable[[Outcome], Awaitable[None]] | None = None,
) -> Outcome:
    """Plays one episode and grades it; the caller stops the environment afterwards."""
    outcome = Outcome()
    started = _now()
    try:
        await _play(env, seed, policy, transcript, settings, outcome, after_turn)
    except OutOfTime as error:
        if not transcript.n_sampled:
            raise InfrastructureError(f"nothing was sampled in {settings.episode_seconds:.0f} s: {error}") from error
    if not transcript.n_sampled:
        raise EngineRefused(
            f"the opening has {len(transcript.ids)} tokens: no room in actor.context_tokens={settings.context_tokens}"
        )
    finished = _now()
    try:
        grade = await _until(finished + settings.grade_seconds, env.score())
    except OutOfTime as error:
        raise InfrastructureError(f"no grade within {settings.grade_seconds:.0f} s (actor.grade_seconds)") from error
    outcome.reward, outcome.parts = grade.reward, dict(grade.parts)
    outcome.timing["grade"] = _now() - finished
    outcome.timing["total"] = _now() - started
    return outcome


async def _play(
    env: ToolEnv,
    seed: int,
    policy: Policy,
    transcript: Transcript,
    settings: ActorSettings,
    outcome: Outcome,
    after_turn: Callable[[Outcome], Awaitable[None]] | None,
) -> None:
    """Takes turns until the environment says that it is done or the context is full; OutOfTime at the deadline."""
    deadline = _now() + settings.episode_seconds
    transcript.open(await _until(deadline, env.start(seed)))
    while len(transcript.ids) < settings.context_tokens:
        asked = _now()
        said = await policy(transcript, deadline - asked)
        deadline += said.waited
        answered = _now()
        content, calls, error = parse(transcript.say(said, answered - asked - said.waited))
        step = await _until(deadline, env.act(calls, content, error))
        took = _now() - answered
        transcript.reward(step.reward)
        outcome.turns += 1
        outcome.malformed += error is not None
        outcome.prefilled += said.prefilled
        outcome.engine = said.engine
        outcome.timing["engine"] += answered - asked - said.waited
        outcome.timing["waited"] += said.waited
        outcome.timing["env"] += took
        if step.done:
            outcome.ended = not step.truncated
            return
        transcript.hear(step.messages, took)
        if after_turn is not None:
            await after_turn(outcome)


async def _until(deadline: float, work: Awaitable[T]) -> T:
    """OutOfTime at the deadline; a TimeoutError of the work's own stays what it is."""
    try:
        async with asyncio.timeout_at(deadline) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise OutOfTime("the environment did not answer before the deadline") from None
        raise


def _now() -> float:
    return asyncio.get_running_loop().time()


def engine_policy(engine: Engine, chat: Chat, settings: ActorSettings, session: str) -> Policy:
    """Lets the run's engines continue the transcript; `session` names the episode, for their prefix caches."""

    async def answer(transcript: Transcript, seconds: float) -> Generation:
        room = settings.context_tokens - len(transcript.ids)
        sampling = {
            "temperature": settings.temperature,
            "max_new_tokens": min(settings.max_new_tokens, room),
            "stop_token_ids": [chat.stop_id],
        }
        return await engine.generate(transcript.ids, sampling, f"{session}/{len(transcript.messages)}", seconds)

    return answer


@dataclass(frozen=True)
class Unleased:
    """Stands in for a lease where the buffer has no part: evaluation and demonstrations."""

    attempt: str
    task: Task
    group: str = ""
    group_size: int = 1
    group_index: int = 0


def to_trajectory(
    outcome: Outcome,
    transcript: Transcript,
    lease: Lease | Unleased,
    source: TaskSource,
    settings: ActorSettings,
    actor: str,
    unfinished: bool = False,
) -> Trajectory:
    return Trajectory(
        id=lease.attempt,
        attempt=lease.attempt,
        task=lease.task,
        group=lease.group,
        group_size=lease.group_size,
        group_index=lease.group_index,
        env=source.env,
        status="segment" if unfinished else "terminated" if outcome.ended else "truncated",
        reward=outcome.reward,
        reward_parts=outcome.parts,
        traces=transcript.traces(),
        timing=outcome.timing,
        engine=outcome.engine,
        actor=actor,
        sampling={"temperature": settings.temperature},
    )
