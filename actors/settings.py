"""What an engine, an actor and a source of tasks can be told. Each process reads all of it from one JSON file.

`Mixture` decides which task a durable index stands for: a pure function of the sources, so that a restarted run neither
skips nor repeats a task.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..buffer import BufferSettings, Task

PERIOD = 1000  # the mixture repeats after so many tasks; weights are exact to one part in it


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineSettings(Settings):
    host: str = "127.0.0.1"
    """Address the engine listens on and is reached at. It has no password: keep it off untrusted networks."""
    dtype: str = "float32"
    """Precision of the engine's weights; bfloat16 is usual on a GPU."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of the engine's computation."""
    max_total_tokens: Annotated[int, Field(ge=1)] = 32768
    """Size of the engine's KV cache, in tokens, over all requests."""
    max_running_requests: Annotated[int, Field(ge=1)] = 32
    """Requests the engine decodes together."""
    start_seconds: Annotated[float, Field(gt=0)] = 240
    """How long a starting engine may take until it is healthy."""
    update_seconds: Annotated[float, Field(gt=0)] = 60
    """How long one call of a weight update may take."""
    ttl_seconds: Annotated[float, Field(gt=0)] = 10
    """An engine that has not been heard of for this long is taken for dead."""
    arguments: tuple[str, ...] = ()
    """More arguments for SGLang's server, for instance ["--tp-size", "2"]; they win over Argosy's own."""

    @field_validator("arguments")
    @classmethod
    def _sample_from_everything(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if any(argument.startswith("--prefe") for argument in arguments):  # SGLang takes abbreviations
            raise ValueError(
                "--preferred-sampling-params cannot be given: with top-p, top-k or penalties the engine would sample "
                "from another distribution than the one whose log-probabilities the learner trains on"
            )
        return arguments


class ActorSettings(Settings):
    concurrency: Annotated[int, Field(ge=1)] = 32
    """Episodes that run at the same time in one actor."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the learner divides its logits by the same."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest assistant message, in tokens."""
    context_tokens: Annotated[int, Field(ge=2)] = 4096
    """Longest context window, in tokens; an episode that reaches it is truncated, and graded."""
    episode_seconds: Annotated[float, Field(gt=0)] = 300
    """Longest episode; one that takes longer is truncated, and graded. Waiting for a dead engine does not count."""
    grade_seconds: Annotated[float, Field(gt=0)] = 60
    """Longest grading; one that takes longer is a failure of the environment, never a reward."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 0
    """An unfinished episode is saved in the buffer after a turn, at most this often; 0: after every turn."""
    segment_tokens: Annotated[int, Field(ge=1)] | None = None
    """An unfinished episode hands in what it sampled each time it has this many new tokens, so that they are trained on
    before it ends; its last turn stays behind. Needs buffer.group_size 1 and a critic. None: whole episodes only."""
    patience_seconds: Annotated[float, Field(gt=0)] = 120
    """How long an episode waits for an engine to come back before its task is given back."""
    drain_seconds: Annotated[float, Field(ge=0)] = 4
    """How long an actor that is asked to stop lets its episodes run on."""


class TaskSource(Settings):
    name: str
    """Name of the source in ledgers, task ids and metrics."""
    env: str
    """A registered environment ("argosy/repair"), an import path ("package.module:Class") or a file beside the recipe
    ("./mine.py:Class")."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the tasks, in proportion to the other sources' weights."""


class ActorConfig(Settings):
    """The JSON file that every process of this folder is started with."""

    run_dir: Path
    model: Path
    """Hugging Face directory with the first weights, the tokenizer and the chat template."""
    buffer: BufferSettings
    engine: EngineSettings = EngineSettings()
    actor: ActorSettings = ActorSettings()
    sources: tuple[TaskSource, ...] = ()
    evaluation: tuple[TaskSource, ...] = ()
    name: str = "actor-0"

    @model_validator(mode="after")
    def _cut_only_what_stands_alone(self) -> Self:
        if self.actor.segment_tokens is not None and self.buffer.group_size > 1:
            raise ValueError(
                f"actor.segment_tokens={self.actor.segment_tokens} needs buffer.group_size=1, not "
                f"{self.buffer.group_size}: a segment has no reward yet that a group could compare"
            )
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate(json.loads(path.read_text()))


class Mixture:
    """Turns the buffer's durable task index into a task: sources interleaved by weight, seeds counted per source."""

    def __init__(self, sources: Sequence[TaskSource]) -> None:
        if not sources:
            raise ValueError("no task source is given: add one under `sources`")
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise ValueError(f"task sources must have different names, got {names}")
        self.sources = {source.name: source for source in sources}
        self._slots = _interleave({s.name: s.weight for s in sources}, PERIOD if len(sources) > 1 else 1)
        self._counts = {name: sum(slot[0] == name for slot in self._slots) for name in names}

    def __call__(self, index: int) -> Task:
        period, slot = divmod(index, len(self._slots))
        name, rank = self._slots[slot]
        seed = period * self._counts[name] + rank
        return Task(id=f"{name}/{seed}", source=name, seed=seed)


def _interleave(weights: dict[str, float], period: int) -> list[tuple[str, int]]:
    """For each slot of a period the source that is furthest behind its share, and how often it came before."""
    total = sum(weights.values())
    counts = dict.fromkeys(weights, 0)
    slots = []
    for slot in range(1, period + 1):
        name = max(weights, key=lambda name: weights[name] / total * slot - counts[name])
        slots.append((name, counts[name]))
        counts[name] += 1
    return slots
