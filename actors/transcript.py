"""The token-exact record of an episode, from which the learner's arrays are made.

Invariant: what the engine is given next is exactly what it was given and sampled before, plus the ids that the chat
template says follow. A sampled id is never decoded and encoded again. A token is marked sampled if and only if the
engine sampled it, the closing token of a message included; every other token came from the template. Where the template
would change what has been said, the trace ends there and a new one starts from a fresh rendering.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def trace(self, parent: int | None) -> Trace:
        return Trace(
            tokens=np.array(self.tokens, np.int32),
            sampled=np.array(self.sampled, bool),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            rewards=list(self.rewards),
            turns=list(self.turns),
            parent=parent,
        )


class Transcript:
    def __init__(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> None:
        self._chat = chat
        self._tools = tools
        self._tools_json = json.dumps(tools)
        self._messages: list[Message] = []
        self._traces: list[_Columns] = []
        self._last_sampled: tuple[_Columns, int] | None = None

    @property
    def ids(self) -> list[int]:
        """What the engine is to continue."""
        return self._traces[-1].tokens

    @property
    def messages(self) -> Sequence[Message]:
        return self._messages

    @property
    def n_sampled(self) -> int:
        return sum(sum(columns.sampled) for columns in self._traces)

    def open(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._start_trace()

    def say(self, said: Generation, seconds: float = 0.0) -> str:
        """Records what the policy sampled; returns its text without the closing token."""
        columns = self._traces[-1]
        start = len(columns.tokens)
        columns.policy(said)
        columns.turns.append(Turn(start, len(columns.tokens), "assistant", seconds=seconds))
        if said.ids:
            self._last_sampled = columns, len(columns.tokens) - 1
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
        if value and self._last_sampled:
            columns, position = self._last_sampled
            columns.rewards.append((position, value))

    def traces(self) -> list[Trace]:
        return [columns.trace(i - 1 if i else None) for i, columns in enumerate(self._traces)]

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
