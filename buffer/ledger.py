"""What the buffer answers about attempts: how many are where, and what happened to one of them.

Invariant: created = trained + dropped + live, in all and for every task source, at any moment. The life cycle keeps the
counts in the same transition as the states; here they are only read.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .trajectory import Task

LIVE = ("queued", "leased", "ready", "claimed")
# Of the life cycle's stories: a letter, what it needs, and the seconds since the event before.
_EVENT = re.compile(r"(d[a-z]|[a-ce-z])([0-9.-]*)(?:\+(\d+))?")
_REASONS = {
    "s": "stale", "f": "filtered", "e": "env_failed", "p": "poisoned", "r": "rejected", "c": "cancelled", "l": "lost",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Balance:
    """Where attempts that were ever created are now."""

    created: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    live: dict[str, int]
    """By state."""

    @property
    def lost(self) -> int:
        return self.created - self.trained - sum(self.dropped.values()) - sum(self.live.values())


@dataclass(frozen=True, slots=True)
class Ledger(Balance):
    """The balance of a run, and of each of its task sources."""

    by_source: dict[str, Balance]

    @property
    def balanced(self) -> bool:
        """Nothing is lost, neither in all nor for any source, and the sources' counts add up to the live sets."""
        sources = self.by_source.values()
        counted = {state: sum(one.live[state] for one in sources) for state in LIVE}
        return self.lost == 0 and all(one.lost == 0 for one in sources) and counted == self.live


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an attempt: Event(1.7e9, "leased by actor-0")."""

    time: float
    """Seconds since the epoch, by Redis' clock, to the second."""
    what: str


@dataclass(frozen=True, slots=True)
class Story:
    """Everything the ledger knows of one attempt."""

    attempt: str
    task: Task
    state: str
    """queued, leased, ready, claimed, trained:<step> or dropped:<reason>."""
    events: list[Event]
    facts: dict[str, str] = field(default_factory=dict)
    """Of a live attempt: its worker, versions, tokens, reward and so on."""


def to_ledger(live: dict[str, int], counts: dict[str, int]) -> Ledger:
    """From the sizes of the live sets and the counts by <state or outcome>|<source>."""
    by_source: dict[str, Counter[str]] = {}
    for name, count in counts.items():
        what, _, source = name.partition("|")
        by_source.setdefault(source, Counter())[what] += count
    everything = sum(by_source.values(), Counter())
    total = _balance(everything)
    sources = {source: _balance(row) for source, row in sorted(by_source.items())}
    return Ledger(total.created, total.trained, total.dropped, live, sources)


def to_story(attempt: str, answer: list[Any]) -> Story:
    """From the life cycle's answer: state, rank there, fields or history, the numbered names, the run's birth in ms."""
    state, rank, told, names, born = answer
    numbered = {int(number): name.decode() for name, number in zip(names[0::2], names[1::2])}
    facts: dict[str, str] = {}
    if state:
        facts = {name.decode(): value.decode() for name, value in zip(told[0::2], told[1::2])}
        label, story = facts.pop("label"), facts.pop("story")
        facts |= {"source": facts["source"], f"rank among the {state.decode()}": rank.decode()}
        for hidden in ("told", "token"):
            facts.pop(hidden, None)
    else:
        label, _, story = told.decode().rpartition(" ")
    return Story(
        attempt, _task(label, numbered), state.decode() or outcome(story), _events(story, numbered, born), facts
    )


def outcome(history: str) -> str:
    """trained:<step> or dropped:<reason>, from a finished attempt's history."""
    letters = _EVENT.findall(history.rpartition(" ")[2])
    letter, argument, _ = letters[-1]
    if letter[0] == "d":
        return f"dropped:{_REASONS[letter[1]]}"
    claims: list[str] = []
    for kind, what, _ in letters:
        if kind == "c":
            claims.append(what.partition(".")[0])
        elif kind in "bm":  # of a claim that was undone
            claims.pop()
    return f"trained:{argument or claims[-1]}"


def _balance(row: Counter[str]) -> Balance:
    dropped = {what.removeprefix("dropped:"): n for what, n in sorted(row.items()) if what.startswith("dropped:")}
    return Balance(row["created"], row["trained"], dropped, {state: row[state] for state in LIVE})


def _task(label: str, names: dict[int, str]) -> Task:
    """From <source's number>:<seed>, or <number>:<seed>:<JSON of the id> where the id is not <source>/<seed>."""
    if not label:  # a learner's checkpoint knows the attempt, and Redis forgot it
        return Task("", "", 0)
    number, _, rest = label.partition(":")
    seed, _, name = rest.partition(":")
    source = names[int(number)]
    return Task(json.loads(name) if name else f"{source}/{seed}", source, int(seed))


def _events(story: str, names: dict[int, str], born_ms: float) -> list[Event]:
    events, time = [], born_ms / 1000
    for letter, argument, pause in _EVENT.findall(story):
        time += int(argument) if letter == "q" else int(pause or 0)
        events.append(Event(time, _sentence(letter, argument, names)))
    return events


def _sentence(letter: str, argument: str, names: dict[int, str]) -> str:
    first, _, second = argument.replace("-", ".").partition(".")
    match letter:
        case "l":
            return f"leased by {names[int(argument)]}"
        case "g":
            return f"segment {argument} came home"
        case "h":
            return f"came home, sampled by version {first}" + f" to {second}" * (first != second)
        case "c":
            return f"claimed for step {first} at version {second}"
        case "t":
            return "trained" + f" in step {argument}" * bool(argument)
    return {
        "q": "created",
        "x": "its worker is gone",
        "f": "the environment failed",
        "r": "handed back",
        "s": "starts over: what there was cannot be continued",
        "b": "ready again: the learner lost the step",
        "m": "queued again: its payload was lost in a power cut",
        **{f"d{code}": f"dropped: {reason}" for code, reason in _REASONS.items()},
    }[letter]
