"""A run's books, read from its keys: where every attempt is, what contradicts itself, and what belongs to nobody."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
from argosy.buffer.ledger import LIVE, outcome

FIXED = {
    "aside", "bell", "control", "failures", "identity", "ledger", "manifests", "names", "outbox", "staleness", "trials",
    "unborn", "active", "offers", "pieces", *LIVE,
}  # fmt: skip


@dataclass
class Books:
    states: dict[str, str] = field(default_factory=dict)
    """Of every attempt that was created; of live ones queued, leased, ready or claimed."""
    stories: dict[str, str] = field(default_factory=dict)
    """Of those that are finished."""
    attempts: dict[str, dict[str, str]] = field(default_factory=dict)
    """The fields of those that live."""
    foretold: set[str] = field(default_factory=set)
    """What a learner's checkpoint says was trained, of which Redis forgot the creation."""
    complaints: list[str] = field(default_factory=list)
    """What must never be between two transitions."""


def read(client: redis.Redis, run: str) -> Books:
    """While nobody else is at work, as it takes three round trips."""
    prefix = f"{{{run}}}:"
    names = sorted(key.decode() for key in client.keys(f"{glob(prefix)}*"))
    with client.pipeline() as pipe:
        for name in names:
            pipe.type(name)
        kinds = pipe.execute()
    with client.pipeline() as pipe:
        for name, kind in zip(names, kinds):
            ask: dict[bytes, Callable[..., Any]] = {
                b"string": pipe.pttl,
                b"hash": pipe.hgetall,
                b"set": pipe.smembers,
                b"list": partial(pipe.lrange, start=0, end=-1),
                b"zset": partial(pipe.zrange, start=0, end=-1),
                b"stream": pipe.xlen,
            }
            if kind != b"none":
                ask[kind](name)
        values = iter(pipe.execute())
    keys = {name.removeprefix(prefix): text(next(values)) for name, kind in zip(names, kinds) if kind != b"none"}
    books = Books()
    _read_states(books, keys)
    _check_groups(books, keys)
    _check_keys(books, keys)
    return books


def glob(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode()
        case dict():
            return {text(k): text(v) for k, v in value.items()}
        case list() | set():
            return type(value)(map(text, value))
    return value


def kind_of(keys: dict[str, Any], kind: str) -> dict[str, Any]:
    return {name.partition(":")[2]: value for name, value in keys.items() if name.startswith(f"{kind}:")}


def group_of(attempt: str) -> str:
    return attempt.partition("/")[0]


def _read_states(books: Books, keys: dict[str, Any]) -> None:
    where = [(attempt, state) for state in LIVE for attempt in keys.get(state, [])]
    for history in kind_of(keys, "history").values():
        for attempt, line in history.items():
            label, _, story = line.rpartition(" ")
            if label:
                books.stories[attempt] = story
                where.append((attempt, outcome(story)))
            else:
                books.foretold.add(attempt)
    books.complaints += [f"{name} is in {n} places" for name, n in Counter(name for name, _ in where).items() if n > 1]
    books.states = dict(where)
    books.attempts = kind_of(keys, "attempt")
    live = {attempt for attempt, state in where if state in LIVE}
    books.complaints += [f"attempt {name} has a hash or a place, not both" for name in live ^ set(books.attempts)]
    counted: Counter[str] = Counter(
        f"{state.partition(':')[0] if state.startswith('trained') else state}|{books.attempts[name]['source']}"
        for name, state in where
        if state in LIVE and name in books.attempts
    )
    for what, number in keys.get("ledger", {}).items():
        if what.partition("|")[0] in LIVE and int(number) != counted[what]:
            books.complaints.append(f"the ledger counts {number} {what}, there are {counted[what]}")


def _check_groups(books: Books, keys: dict[str, Any]) -> None:
    members: dict[str, set[str]] = {}
    for attempt in books.attempts:
        members.setdefault(group_of(attempt), set()).add(attempt)
    groups = {
        group: {f"{group}/{member}" for member in row.get("alive", "").split(",")}
        for group, row in kind_of(keys, "group").items()
    }
    offers = set(keys.get("offers", []))
    offered = {group_of(offer) for offer in offers}
    for group in members.keys() | groups.keys():
        if members.get(group) != groups.get(group):
            books.complaints.append(f"group {group} has {groups.get(group)}, alive are {members.get(group)}")
        ready = all(books.states.get(attempt) == "ready" for attempt in members.get(group, []))
        if ready != (group in offered):
            books.complaints.append(f"group {group} is {'complete, not offered' if ready else 'offered, not complete'}")
    for offer in offers:
        ids = offer.partition("|")[0].split(",")
        if set(ids) != members.get(group_of(offer)) or len(offered) != len(offers):
            books.complaints.append(f"{offer} is offered of {members.get(group_of(offer))}; offers: {offers}")
    for name, known in (("pieces", offers), ("active", set(groups))):
        if strangers := set(keys.get(name, [])) - known:
            books.complaints.append(f"{name} holds {strangers}")


def _check_keys(books: Books, keys: dict[str, Any]) -> None:
    """Every key belongs to something that lives, or is bound to expire."""
    used = [row[kind] for row in books.attempts.values() for kind in ("payload", "partial") if kind in row]
    used += keys.get("outbox", [])
    blobs = {name.rpartition("}:")[2] for name in used}
    for name, value in keys.items():
        kind = name.partition(":")[0]
        belongs = name in FIXED or name in blobs or kind in ("history", "attempt", "group", "weights")
        expires = isinstance(value, int) and value != -1  # or it is just gone
        if not (belongs or expires):
            books.complaints.append(f"{name} is an orphan")
