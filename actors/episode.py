"""One episode: policy, transcript and environment take turns until one of them, or a limit, ends it.

Invariant: an `Outcome` is a graded, valid episode. What the agent does wrong (a malformed call, code that crashes, too
many turns, tokens or seconds) is in its grade; whatever else goes wrong is an exception and never a reward of 0.
It waits for the policy and for the environment, each within the episode's deadline, and then for the grade.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..buffer import Lease, Task, Trace, Trajectory
from ..buffer.trajectory import Status
from ..envs import InfrastructureError, ToolEnv
from .chat import Chat
from .engine import Engine, Generation
from .errors import EngineRefused, OutOfTime
from .settings import ActorSettings, TaskSource
from .tool_calls import parse
from .transcript import Transcript

UNUSABLE = 7  # tokens at the end of a context: SGLang refuses a prompt that reaches into them

T = TypeVar("T")

Policy = Callable[[Transcript, float], Awaitable[Generation]]
"""Continues the transcript within so many seconds (OutOfTime if it cannot)."""


@dataclass
class Outcome:
    """What came of an episode, beside its transcript."""

    status: Status = "segment"
    """How it ended; "segment" while it goes on."""
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
    """Seconds. `waited` went by without an engine or the buffer and does not count against the deadline."""


async def run_episode(
    env: ToolEnv,
    seed: int,
    policy: Policy,
    transcript: Transcript,
    settings: ActorSettings,
    after_turn: Callable[[Outcome], Awaitable[None]] | None = None,
    so_far: Outcome | None = None,
) -> Outcome:
    """Plays one episode and grades it; the caller stops the environment afterwards.

    `after_turn` may store what there is, or cut the transcript, before the episode goes on. `so_far`: environment and
    transcript are in the middle of an episode, which goes on from there (`Unfinished.resume`).
    """
    outcome = so_far or Outcome()
    started = _now() - outcome.timing["total"]
    ended = False
    try:
        if so_far is None:
            transcript.open(await until(started + settings.episode_seconds, env.start(seed)))
        ended = await _play(env, policy, transcript, settings, outcome, started, after_turn)
    except OutOfTime as error:
        if not transcript.n_sampled:
            raise InfrastructureError(f"nothing was sampled in {settings.episode_seconds:.0f} s: {error}") from error
    if not transcript.n_sampled:
        raise EngineRefused(
            f"the opening has {len(transcript.ids)} tokens: no room in actor.context_tokens={settings.context_tokens}"
        )
    finished = _now()
    try:
        grade = await until(finished + settings.grade_seconds, env.score())
    except OutOfTime as error:
        raise InfrastructureError(f"no grade within {settings.grade_seconds:.0f} s (actor.grade_seconds)") from error
    outcome.status = "terminated" if ended else "truncated"
    outcome.reward, outcome.parts = grade.reward, dict(grade.parts)
    outcome.timing["grade"] = _now() - finished
    outcome.timing["total"] = _now() - started
    return outcome


async def _play(
    env: ToolEnv,
    policy: Policy,
    transcript: Transcript,
    settings: ActorSettings,
    outcome: Outcome,
    started: float,
    after_turn: Callable[[Outcome], Awaitable[None]] | None,
) -> bool:
    """Takes turns until the environment ends the episode (True) or the context is full; OutOfTime at the deadline."""
    deadline = started + settings.episode_seconds + outcome.timing["waited"]
    while len(transcript.ids) + UNUSABLE <= settings.context_tokens:
        asked = _now()
        said = await policy(transcript, deadline - asked)
        deadline += said.waited
        answered = _now()
        content, calls, error = parse(transcript.say(said, answered - asked - said.waited))
        step = await until(deadline, env.act(calls, content, error))
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
            return not step.truncated
        transcript.hear(step.messages, took)
        if after_turn is not None:
            before = _now()
            outcome.timing["total"] = before - started
            await after_turn(outcome)
            outcome.timing["waited"] += _now() - before
            deadline += _now() - before
    return False


async def until(deadline: float, work: Awaitable[T]) -> T:
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
    traces: list[Trace],
    lease: Lease | Unleased,
    source: TaskSource,
    settings: ActorSettings,
    actor: str,
) -> Trajectory:
    return Trajectory(
        id=lease.attempt,
        attempt=lease.attempt,
        task=lease.task,
        group=lease.group,
        group_size=lease.group_size,
        group_index=lease.group_index,
        env=source.env,
        status=outcome.status,
        reward=outcome.reward,
        reward_parts=outcome.parts,
        traces=traces,
        timing=dict(outcome.timing),
        engine=outcome.engine,
        actor=actor,
        sampling=sampling(settings),
    )


def sampling(settings: ActorSettings) -> dict[str, Any]:
    """What a trajectory says of how its tokens were sampled."""
    return {"temperature": settings.temperature}
