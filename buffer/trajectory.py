"""What one attempt brings home; the only schema that actors and learner share.

Invariant: a `Trajectory` that exists is consistent. Every column of a trace has the same length; log-probability and
version are set exactly where a token was sampled; spans and positions lie inside. The constructors guarantee it, so no
reader checks again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidTrajectory

SCHEMA = 1
NOT_SAMPLED = -1

Status = Literal["terminated", "truncated", "segment"]

_COLUMNS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the recipe's mixture: Task("repair/17", source="repair", seed=17)."""

    id: str
    source: str
    seed: int


class Turn(NamedTuple):
    """The tokens of one message's content; what the chat template writes around it belongs to no turn.

    Turn(12, 40, "tool", tool="run_tests", seconds=0.02)
    """

    start: int
    end: int
    role: str
    tool: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Turns(Sequence[Turn]):
    """Turns as columns, made one by one when they are asked for.

    A batch of long episodes has tens of thousands; as objects that stay they would cost the garbage collector more time
    than everything else takes that is done to read the batch.
    """

    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    said_by: NDArray[np.int32]
    """Indices into `voices`."""
    voices: list[tuple[str, str | None]]
    """Roles and tools."""
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Turns(self.starts[index], self.ends[index], self.said_by[index], self.voices, self.seconds[index])
        role, tool = self.voices[self.said_by[index]]
        return Turn(int(self.starts[index]), int(self.ends[index]), role, tool, float(self.seconds[index]))

    def __iter__(self) -> Iterator[Turn]:
        voices = map(self.voices.__getitem__, self.said_by.tolist())
        columns = zip(self.starts.tolist(), self.ends.tolist(), voices, self.seconds.tolist())
        return (Turn(start, end, role, tool, seconds) for start, end, (role, tool), seconds in columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def lie_within(self, length: int) -> bool:
        """Whether they follow one another in the first `length` tokens."""
        starts, ends = self.starts, self.ends
        if not len(starts):
            return True
        backwards = np.count_nonzero(ends < starts) + np.count_nonzero(starts[1:] < ends[:-1])
        return bool(starts[0] >= 0 and ends[-1] <= length and not backwards)


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """One context window, token by token; a compaction or a sub-agent starts another, `parent` and `kind` say which.

    Trace(tokens=[5, 6, 7], sampled=[0, 1, 1], logprobs=[0, -0.5, -0.1], versions=[-1, 3, 3], rewards=[(2, 1.0)])
    """

    tokens: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """The engine's log-probability of each sampled token, after temperature; 0 where not sampled."""
    versions: NDArray[np.int32]
    """The weights that sampled each token; -1 where not sampled."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(position, value): earned by the action that ends at this token."""
    turns: Sequence[Turn] = field(default_factory=list)
    parent: int | None = None
    kind: str = "main"

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype))
        length = len(self.tokens)
        shapes = [getattr(self, name).shape for name in _COLUMNS]
        if shapes != [(length,)] * len(_COLUMNS) or not length:
            raise InvalidTrajectory(f"a trace needs columns of one length above 0: {dict(zip(_COLUMNS, shapes))}")
        if int(self.versions.min()) < NOT_SAMPLED or ((self.versions >= 0) != self.sampled).any():
            raise InvalidTrajectory("a token has a version if and only if it was sampled, else -1")
        if not np.isfinite(self.logprobs).all() or ((self.logprobs != 0) > self.sampled).any():
            raise InvalidTrajectory("log-probabilities must be finite, and 0 where nothing was sampled")
        self._check_the_rest()

    @classmethod
    def of_columns(cls, **fields: Any) -> "Trace":
        """A trace whose columns have the right types, are of one length and agree about what was sampled: the caller
        made them so, and here that is not compared again."""
        trace: Trace = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(trace, name, value)
        trace._check_the_rest()
        return trace

    def _check_the_rest(self) -> None:
        length = len(self.tokens)
        # count_nonzero is the fastest way to ask whether anything is true
        if not length or np.count_nonzero(self.tokens < 0):
            raise InvalidTrajectory("a token id is negative, or there is no token")
        for position, value in self.rewards:
            if not (0 <= position < length and math.isfinite(value)):
                raise InvalidTrajectory(f"reward {value} at position {position} of {length} tokens")
        if isinstance(self.turns, Turns) and self.turns.lie_within(length):
            return
        end = 0
        for turn in self.turns:
            if not end <= turn.start <= turn.end <= length:
                raise InvalidTrajectory(f"{turn} overlaps the one before it or leaves the {length} tokens")
            end = turn.end

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        ours, theirs = ((t.rewards, t.turns, t.parent, t.kind) for t in (self, other))
        return ours == theirs and all(np.array_equal(getattr(self, c), getattr(other, c)) for c in _COLUMNS)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished (or interrupted) episode, ready to train on."""

    id: str
    attempt: str
    task: Task
    group: str
    group_size: int
    group_index: int
    env: str
    status: Status
    """terminated: the environment ended it; truncated: a limit did; segment: it goes on in another trajectory."""
    reward: float
    reward_parts: dict[str, float]
    traces: list[Trace]
    timing: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    actor: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What the engine was asked for: temperature, top_p, ..."""
    schema: int = SCHEMA
    state: dict[str, Any] = field(default_factory=dict)
    """What a worker needs to go on with an unfinished episode; empty once it is finished."""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise InvalidTrajectory(f"status is {self.status!r}, not one of {get_args(Status)}")
        if not all(map(math.isfinite, (self.reward, *self.reward_parts.values()))):
            raise InvalidTrajectory(f"a reward is not finite: {self.reward} {self.reward_parts}")
        if not 0 <= self.group_index < self.group_size:
            raise InvalidTrajectory(f"member {self.group_index} of a group of {self.group_size}")
        if not self.traces:
            raise InvalidTrajectory("there is no trace")
        for i, trace in enumerate(self.traces):
            if trace.parent is not None and not 0 <= trace.parent < i:
                raise InvalidTrajectory(f"the parent of trace {i} is {trace.parent}")

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token of it; None if nothing was sampled."""
        # seen as unsigned, NOT_SAMPLED is the largest number: one pass, and nothing is copied
        oldest = min(int(trace.versions.view(np.uint32).min()) for trace in self.traces)
        return None if oldest == NOT_SAMPLED % 2**32 else oldest

    @property
    def newest_version(self) -> int | None:
        """The newest weights that sampled a token of it; None if nothing was sampled."""
        newest = max(int(trace.versions.max()) for trace in self.traces)
        return None if newest == NOT_SAMPLED else newest

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.traces))

    @property
    def n_sampled(self) -> int:
        return sum(int(np.count_nonzero(trace.sampled)) for trace in self.traces)
