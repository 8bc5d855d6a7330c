"""The token-exact record of an episode, from which the learner's arrays are made.

Invariant: what the engine is given next is exactly what it was given and sampled before, plus the ids that the chat
template says follow. A sampled id is never decoded and encoded again. A token is marked sampled if and only if the
engine sampled it, the closing token of a message included, and it was not handed in before (`cut`); every other token
is context. Where the template would change what has been said, the trace ends there and a new one starts from a fresh
rendering.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ..buffer import Trace, Turn
from ..envs import Message
from .chat import Chat, Rendered
from .engine import Generation


@dataclass
class _Columns:
    """One trace in the making."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def of(cls, trace: Trace) -> Self:
        return cls(
            tokens=trace.tokens.tolist(),
            sampled=trace.sampled.tolist(),
            logprobs=trace.logprobs.tolist(),
            versions=trace.versions.tolist(),
            rewards=list(trace.rewards),
            turns=list(trace.turns),
        )

    def template(self, ids: Sequence[int]) -> None:
        self._append(ids, False, [0.0] * len(ids), [-1] * len(ids))

    def policy(self, said: Generation) -> None:
        self._append(said.ids, True, said.logprobs, said.versions)

    def _append(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(ids)} ids came with {len(logprobs)} logprobs and {len(versions)} versions")
        self.tokens += ids
        self.sampled += [sampled] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    def forget(self, end: int) -> None:
        """Makes context of everything before `end`."""
        self.sampled[:end] = [False] * end
        self.logprobs[:end] = [0.0] * end
        self.versions[:end] = [-1] * end
        self.rewards = [(position, value) for position, value in self.rewards if position >= end]

    def trace(self, parent: int | None, end: int | None = None) -> Trace:
        end = len(self.tokens) if end is None else end
        return Trace(
            tokens=np.array(self.tokens[:end], np.int32),
            sampled=np.array(self.sampled[:end], bool),
            logprobs=np.array(self.logprobs[:end], np.float32),
            versions=np.array(self.versions[:end], np.int32),
            rewards=[(position, value) for position, value in self.rewards if position < end],
            turns=[turn for turn in self.turns if turn.end <= end],
            parent=parent,
        )


class Transcript:
    def __init__(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> None:
        self._chat = chat
        self._tools = tools
        self._tools_json = json.dumps(tools)
        self._messages: list[Message] = []
        self._traces: list[_Columns] = []

    @property
    def ids(self) -> list[int]:
        """What the engine is to continue."""
        return self._traces[-1].tokens

    @property
    def messages(self) -> Sequence[Message]:
        return self._messages

    @property
    def n_sampled(self) -> int:
        """Sampled tokens that were not handed in."""
        return sum(sum(columns.sampled) for columns in self._traces)

    @property
    def n_before_last(self) -> int:
        """Sampled tokens that `cut` would hand in."""
        last = self._last_said()
        return self.n_sampled - (last[1].end - last[1].start) if last else 0

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled any of `n_sampled`."""
        return min((v for columns in self._traces for v in columns.versions if v >= 0), default=None)

    def open(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._start_trace()

    def say(self, said: Generation, seconds: float = 0.0) -> str:
        """Records what the policy sampled; returns its text without the closing token."""
        columns = self._traces[-1]
        start = len(columns.tokens)
        columns.policy(said)
        columns.turns.append(Turn(start, len(columns.tokens), "assistant", seconds=seconds))
        text = self._chat.decode(said.ids[:-1] if self._stopped() else said.ids)
        self._messages.append({"role": "assistant", "content": text})
        return text

    def hear(self, messages: Sequence[Message], seconds: float = 0.0) -> None:
        """Records the environment's answer, which took `seconds`, and hands the word back to the policy."""
        rendered = self._chat.following(json.dumps(messages), self._tools_json, self._stopped())
        self._messages += messages
        if rendered is None:
            self._start_trace()
        else:
            self._add(rendered, messages, seconds)

    def reward(self, value: float) -> None:
        """Rewards the last sampled token."""
        last = self._last_said()
        if value and last:
            self._traces[last[0]].rewards.append((last[1].end - 1, value))

    def traces(self) -> list[Trace]:
        return [columns.trace(i - 1 if i else None) for i, columns in enumerate(self._traces)]

    def cut(self) -> list[Trace]:
        """Hands in what was sampled before the policy's last message; from now on that is context.

        What is handed in ends where that message began, so a critic's value there is what followed. The message itself
        stays behind, so that whatever is still earned, the grade included, has a sampled token to stand at. Context
        windows that were left before it are over, and forgotten.
        """
        last = self._last_said()
        assert last, "nothing was sampled yet"
        window, start = last[0], last[1].start
        ends = [None] * window + [start]
        piece = [self._traces[i].trace(i - 1 if i else None, end) for i, end in enumerate(ends)]
        del self._traces[:window]
        self._traces[0].forget(start)
        return piece

    def restore(self, messages: Sequence[Message], traces: Sequence[Trace]) -> None:
        """Becomes the transcript that had these `messages` and gave these `traces`."""
        self._messages = list(messages)
        self._traces = [_Columns.of(trace) for trace in traces]

    def _last_said(self) -> tuple[int, Turn] | None:
        """The last message with a sampled token that was not handed in, and its trace."""
        for i in reversed(range(len(self._traces))):
            for turn in reversed(self._traces[i].turns):
                if turn.start < turn.end and self._traces[i].sampled[turn.start]:
                    return i, turn
        return None

    def _start_trace(self) -> None:
        self._traces.append(_Columns())
        self._add(self._chat.opening(self._messages, self._tools), self._messages)

    def _add(self, rendered: Rendered, messages: Sequence[Message], seconds: float = 0.0) -> None:
        columns = self._traces[-1]
        offset = len(columns.tokens)
        columns.template(rendered.ids)
        for message, (start, end) in zip(messages, rendered.spans):
            turn = Turn(offset + start, offset + end, message["role"], message.get("name"), seconds)
            columns.turns.append(turn)
            seconds = 0.0  # one answer may be several messages; the time is told once

    def _stopped(self) -> bool:
        """Whether the policy closed its message itself, rather than being cut off."""
        columns = self._traces[-1]
        return columns.sampled[-1] and columns.tokens[-1] == self._chat.stop_id
