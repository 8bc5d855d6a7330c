"""An unfinished episode as the buffer knows it: stored after a turn, handed in in segments, gone on with elsewhere.

Invariants: (1) Each sampled token comes home once, in a segment or at the end: a segment and the checkpoint that goes
on from it are made together and reach the buffer in one transition. (2) An episode goes on only from where it certainly
stands. The environment, begun anew with the task's seed and given every message of the policy once more, must answer
word for word what was recorded; where it does not, or anything else is not as it was, `resume` raises CannotContinue
with the difference, and has not touched the transcript. (3) What was sampled is taken over as recorded, ids,
log-probabilities and versions: nothing is tokenised or sampled again.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, ValidationError

from ..buffer import Lease, Trace, Trajectory
from ..envs import InfrastructureError, Message, ToolEnv
from .chat import Chat
from .episode import Outcome, sampling, to_trajectory, until
from .errors import CannotContinue, OutOfTime
from .settings import ActorSettings, TaskSource
from .tool_calls import parse
from .transcript import Transcript

SHOWN = 80  # characters of an answer that a reason quotes


class State(BaseModel):
    """What a checkpoint holds beside its traces: `Trajectory.state`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    messages: list[Message]
    turns: int
    malformed: int
    prefilled: int
    segments: int
    """How many segments were handed in before."""
    tools: str
    """Digest of what the policy was told of its tools: the traces begin with it."""


class Unfinished:
    def __init__(
        self, lease: Lease, env: ToolEnv, chat: Chat, source: TaskSource, settings: ActorSettings, actor: str
    ) -> None:
        tools = env.tool_schemas()
        self.transcript = Transcript(chat, tools)
        self._tools = hashlib.sha256(json.dumps(tools).encode()).hexdigest()[:16]
        self.replayable = env.replayable
        self._lease = lease
        self._env = env
        self._source = source
        self._settings = settings
        self._actor = actor
        self._segments = lease.segments

    def trajectory(self, outcome: Outcome) -> Trajectory:
        """What is to be handed in when the episode is over."""
        return self._trajectory(outcome, self._lease, self.transcript.traces())

    def checkpoint(self, outcome: Outcome) -> Trajectory:
        """What `resume` needs, in another process."""
        state = State(
            messages=list(self.transcript.messages),
            turns=outcome.turns,
            malformed=outcome.malformed,
            prefilled=outcome.prefilled,
            segments=self._segments,
            tools=self._tools,
        )
        return replace(self.trajectory(outcome), state=state.model_dump())

    def segment(self, outcome: Outcome) -> tuple[int, Trajectory, Trajectory] | None:
        """Its number, the segment and the checkpoint that goes on from it, if enough was sampled since the last one."""
        enough = self._settings.segment_tokens
        if enough is None or self.transcript.n_before_last < enough:
            return None
        self._segments += 1
        piece = self._trajectory(outcome, self._lease.piece(self._segments), self.transcript.cut())
        return self._segments, piece, self.checkpoint(outcome)

    async def resume(self) -> Outcome:
        """Brings environment and transcript to where `lease.partial` ends, for `run_episode` to go on."""
        partial = self._lease.partial
        assert partial is not None
        try:
            state = State.model_validate(partial.state)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CannotContinue(f"its state is not understood: {where}: {first['msg']}") from None
        _same("the environment", partial.env, self._source.env)
        _same("the task", partial.task, self._lease.task)
        _same("the sampling", partial.sampling, sampling(self._settings))
        _same("the tools", state.tools, self._tools)
        _same("the number of segments at home", state.segments, self._lease.segments)
        if not self._env.replayable:
            raise CannotContinue(f"{self._source.env} cannot be replayed")
        deadline = asyncio.get_running_loop().time() + self._settings.episode_seconds
        try:
            await until(deadline, _replay(self._env, self._lease.task.seed, state.messages))
        except OutOfTime:
            raise CannotContinue(f"the replay took more than {self._settings.episode_seconds:.0f} s") from None
        self.transcript.restore(state.messages, partial.traces)
        return Outcome(
            turns=state.turns,
            malformed=state.malformed,
            prefilled=state.prefilled,
            engine=partial.engine,
            timing=Outcome().timing | partial.timing,
        )

    def _trajectory(self, outcome: Outcome, lease: Lease, traces: list[Trace]) -> Trajectory:
        return to_trajectory(outcome, traces, lease, self._source, self._settings, self._actor)


async def _replay(env: ToolEnv, seed: int, messages: Sequence[Message]) -> None:
    at = _heard(messages, 0, await env.start(seed), "the opening")
    turn = 0
    while at < len(messages):
        turn += 1
        match messages[at]:
            case {"role": "assistant", "content": str(said)}:
                content, calls, malformed = parse(said)
            case more:
                raise CannotContinue(f"turn {turn - 1} differs: {_difference(more, {'content': ''})}")
        try:
            step = await env.act(calls, content, malformed)
        except InfrastructureError:
            raise
        except Exception as error:  # the recorded turn was answered; if this is a bug, the fresh start will show it
            raise CannotContinue(f"turn {turn} raised {error!r}") from error
        if step.done:
            raise CannotContinue(f"turn {turn} ended the episode, which went on when it was recorded")
        at = _heard(messages, at + 1, step.messages, f"turn {turn}")


def _heard(recorded: Sequence[Message], at: int, heard: Sequence[Message], where: str) -> int:
    """Compares what the environment says now with the record from `at` on; returns where that ends."""
    for i, message in enumerate(heard, at):
        before = recorded[i] if i < len(recorded) else {"content": ""}
        if message != before:
            raise CannotContinue(f"{where} differs: {_difference(before, message)}")
    return at + len(heard)


def _same(what: str, recorded: object, now: object) -> None:
    if recorded != now:
        raise CannotContinue(f"{what} was {recorded!r} and is {now!r}")


def _difference(recorded: Message, now: Message) -> str:
    """What two messages say from where they differ on, or all else that they are."""
    before, after = str(recorded.get("content")), str(now.get("content"))
    if before == after:
        before, after = str(recorded), str(now)
    same = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
    at = max(0, same - SHOWN // 4)
    return f"it was {before[at : at + SHOWN]!r} and is {after[at : at + SHOWN]!r} at character {at}"
