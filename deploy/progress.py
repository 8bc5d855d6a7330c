"""What a run has done so far, read from its folder and its buffer: the one source of the view, the summary, the report.

Invariant: reading changes nothing and needs no running process. A learner that went back to a checkpoint does some
steps again: only the steps that the newest weights went through count.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..actors.settings import TaskSource
from ..buffer import Ledger
from .paths import RunPaths
from .recipe import Recipe

Record = dict[str, Any]
STAGES = ("supervised", "value", "policy")
ALARM_STEPS = 3


class Tail:
    """The JSON lines of a file that is still being written, in pieces: `read` gives those that are new.

    A line that a full disk or a power loss tore is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> list[Record]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._at += len(complete)
        return list(_parsed(complete.splitlines()))


@dataclass
class ActorProgress:
    """One actor's counters, added up over its restarts."""

    last: Record = field(default_factory=dict)
    before: Record = field(default_factory=dict)
    """Totals of the processes before the present one."""

    def add(self, line: Record) -> None:
        if self.last and line["episodes"] < self.last["episodes"]:
            self.before = {key: self.total(key) for key in ("episodes", "sampled_tokens", "engine_tokens", "failed")}
        self.last = line

    def total(self, key: str) -> int:
        return self.before.get(key, 0) + self.last.get(key, 0)


class Progress:
    """Made once per run and updated now and then."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._metrics = Tail(paths.metrics)
        self._journal = Tail(paths.journal)
        self._actor_files: dict[str, Tail] = {}
        self.actors: dict[str, ActorProgress] = {}
        self.steps: dict[str, dict[int, Record]] = {stage: {} for stage in STAGES}
        """The learner's records by stage and step."""
        self.curve: list[tuple[float, float]] = []
        """(time, mean reward of an actor's newest episodes), a point a second."""
        self.journal: list[Record] = []
        self.ledger: Ledger | None = None

    def update(self) -> None:
        for record in self._metrics.read():
            self._add(record)
        self.journal += self._journal.read()
        for file in sorted(self._paths.actors.glob("*.jsonl")):
            tail = self._actor_files.setdefault(file.stem, Tail(file))
            actor = self.actors.setdefault(file.stem, ActorProgress())
            for line in tail.read():
                actor.add(line)
                if line["success"] is not None:
                    self.curve.append((line["time"], line["success"]))

    def _add(self, record: Record) -> None:
        """A step that is done again undoes all that had come after it."""
        stage, step = record["stage"], record["step"]
        for later in STAGES[STAGES.index(stage) + 1 :]:
            self.steps[later].clear()
        steps = self.steps[stage]
        while steps and next(reversed(steps)) >= step:
            steps.popitem()
        steps[step] = record

    def series(self, stage: str) -> list[Record]:
        """A stage's records in the order of their steps."""
        return list(self.steps[stage].values())

    def latest(self) -> Record:
        """The learner's newest record, {} before the first."""
        return next((next(reversed(steps.values())) for steps in reversed(self.steps.values()) if steps), {})

    def alarms(self) -> list[Record]:
        """The newest step's alarms, without those that its predecessors did not raise: one batch is no trend."""
        newest = self.series("policy")[-ALARM_STEPS:]
        raised = [{alarm["name"] for alarm in record["alarms"]} for record in newest]
        return (
            [alarm for alarm in newest[-1]["alarms"] if all(alarm["name"] in names for names in raised)]
            if newest
            else []
        )

    def total(self, key: str) -> float:
        """A number of the learner's records, added up over all steps."""
        return sum(record.get(key) or 0 for _, record in self.records())

    def records(self) -> Iterator[tuple[str, Record]]:
        for stage in STAGES:
            for record in self.series(stage):
                yield stage, record

    def engine_tokens(self) -> int:
        return sum(actor.total("engine_tokens") for actor in self.actors.values())


def summary(progress: Progress, paths: RunPaths, recipe: Recipe) -> Record:
    """The run in a few numbers. Success is that of the evaluations, a mean over their episodes.

    rl_seconds is the time of the policy stage, without pauses; episodes are attempts that were played to their end.
    """
    ledger, policy = progress.ledger, progress.series("policy")
    assert ledger is not None
    dropped = sum(ledger.dropped.values())
    unplayed = sum(ledger.live.get(state, 0) for state in ("queued", "leased"))
    unplayed += sum(ledger.dropped.get(reason, 0) for reason in ("env_failed", "poisoned"))
    before, after = (evaluations(paths, when, recipe.evaluation) for when in ("before", "after"))
    return {
        "success_before": _success(before),
        "success_after": _success(after),
        "rl_seconds": round(sum(record["seconds"] for record in policy), 1),
        "rl_steps": len(policy),
        "episodes": ledger.created - unplayed,
        "created": ledger.created,
        "trained": ledger.trained,
        "dropped": dropped,
        "dropped_by_reason": ledger.dropped,
        "live": ledger.live,
        "lost": ledger.lost,
        "max_staleness": max((record["staleness_max"] for record in policy), default=0),
        "mean_staleness": _mean([record["staleness_mean"] for record in policy]),
        "eta": recipe.buffer.eta,
        "learner_tokens": int(progress.total("tokens")),
        "engine_tokens": progress.engine_tokens(),
        "version": progress.latest().get("version"),
        "restarts": sum(record["event"] == "restarted" for record in progress.journal),
        "evaluations": {
            when: [_numbers(one) for one in found] for when, found in (("before", before), ("after", after))
        },
    }


def evaluations(paths: RunPaths, when: str, sources: Sequence[TaskSource]) -> list[Record]:
    """What the evaluations before or after training have found so far, one a source."""
    files = {source.name: paths.evaluation(when, source.name) for source in sources}
    return [{"source": name, **json.loads(file.read_text())} for name, file in files.items() if file.exists()]


def _parsed(lines: Sequence[bytes]) -> Iterator[Record]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _success(found: list[Record]) -> float | None:
    episodes = sum(one["episodes"] for one in found)
    return sum(one["success"] * one["episodes"] for one in found) / episodes if episodes else None


def _numbers(evaluation: Record) -> Record:
    return {key: value for key, value in evaluation.items() if key != "transcripts"}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
