"""The processes that chaos.py starts and kills: workers, a learner of two ranks, a saboteur.

The learner has no model. Its "weights" are the log of what it trained on, cut to the length that its checkpoint names,
so that every promise can be checked against the lineage that survives. Every sampled token has an id of its own.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import redis
from argosy.buffer import BufferSettings, Candidate, Lease, Lineage, ReplayBuffer, Task, Trace, Trajectory, Unreadable

CHECKPOINT_EVERY = 3
PEER_LOST = 17  # exit status: the other rank died, and the learner starts again as a whole
EPISODES = 6  # of one worker at a time
TOKENS = 100_000  # ids of one process
PROMPT = 0


@dataclass(frozen=True)
class Life:
    """What all processes of one seed know."""

    settings: BufferSettings
    segments: bool
    folder: Path

    @property
    def archive(self) -> Path:
        return self.folder / "archive"


def task(index: int) -> Task:
    return Task(f"chaos/{index}", f"source-{index % 2}", index)


def prefer_short(candidate: Candidate) -> float:
    """For buffer.order."""
    return 1.0 / (1 + candidate.tokens)


# Workers


class Episode:
    """What one worker has of an attempt: tokens that came home in segments, and those sampled since."""

    def __init__(self, lease: Lease) -> None:
        self.lease, self.segments = lease, lease.segments
        self.home: list[int] = []
        self.sampled: list[tuple[int, int]] = []  # token, version
        self.sent: list[tuple[int, Trajectory, Trajectory]] = []  # segments

    def resume(self, partial: Trajectory) -> None:
        (trace,) = partial.traces
        self.home, sampled = tokens(partial)
        self.sampled = list(zip(sampled, trace.versions[trace.sampled].tolist()))

    @property
    def oldest(self) -> int | None:
        return min((version for _, version in self.sampled), default=None)

    def bring(self, lease: Lease, **state: Any) -> Trajectory:
        new, versions = zip(*self.sampled) if self.sampled else ((), ())
        tokens = np.array([PROMPT, *self.home, *new])
        column = np.array([-1] * (1 + len(self.home)) + [*versions])
        trace = Trace(tokens, column >= 0, np.where(column >= 0, -1.0, 0.0), column)
        where = (lease.attempt, lease.task, lease.group, lease.group_size, lease.group_index)
        return Trajectory(lease.token, *where, "chaos", "terminated", 1.0, {}, [trace], state=state)

    def checkpoint(self) -> Trajectory:
        return self.bring(self.lease, segments=self.segments)

    def cut(self) -> tuple[int, Trajectory, Trajectory]:
        self.segments += 1
        piece = self.bring(self.lease.piece(self.segments))
        self.home += [token for token, _ in self.sampled]
        self.sampled = []
        self.sent.append((self.segments, piece, self.checkpoint()))
        return self.sent[-1]


class Worker:
    def __init__(self, life: Life, name: str, birth: int) -> None:
        self.life, self.name = life, name
        self.buffer, self.rng = ReplayBuffer(life.settings), random.Random(f"{name} {birth}")
        self.tokens = count(1 + birth * TOKENS)
        self.episodes: list[Episode] = []
        self.forgotten: list[Episode] = []  # whose leases expire, or did

    def run(self) -> None:
        self.buffer.abandon(self.name)
        while True:
            self.take()
            if self.rng.random() < 0.1:
                self.heartbeat()
            if self.episodes:
                self.turn(self.rng.choice(self.episodes))
            if self.forgotten and self.rng.random() < 0.05:
                self.come_late(self.forgotten.pop(0))
            time.sleep(0.003 * self.rng.random())

    def take(self) -> None:
        free = EPISODES - len(self.episodes)
        if not free:
            return
        self.buffer.put_tasks(task, self.rng.randint(1, 4))
        for lease in self.buffer.lease(self.name, free):
            episode = Episode(lease)
            if lease.partial and lease.partial.state["segments"] == lease.segments:
                episode.resume(lease.partial)
            elif lease.partial:
                self.buffer.start_over(lease, "its segments came home, and the partial did not")
            self.episodes.append(episode)
        if not self.episodes:
            self.buffer.wait(0.2)

    def heartbeat(self) -> None:
        oldest = {e.lease.attempt: e.oldest for e in self.episodes if e.oldest is not None}
        held = self.buffer.heartbeat([episode.lease for episode in self.episodes], oldest)
        self.episodes = [episode for episode in self.episodes if episode.lease in held]

    def turn(self, episode: Episode) -> None:
        lease, dice = episode.lease, self.rng.random()
        ends = dice < 0.05 or dice > 0.75
        if ends:
            self.episodes.remove(episode)
        if dice < 0.02:
            self.forgotten.append(episode)
        elif dice < 0.04:
            self.buffer.fail(lease, "sandbox_gone")
        elif dice < 0.05:
            self.buffer.release(lease)
        elif dice < 0.2 and not (self.life.segments and dice < 0.12):
            self.buffer.checkpoint(lease, episode.checkpoint())
        elif dice < 0.2 and episode.sampled:
            self.twice(lambda cut: self.buffer.segment(lease, *cut), episode.cut())
        elif ends and episode.sampled:
            self.twice(lambda whole: self.buffer.complete(lease, whole), episode.bring(lease))
        else:
            version = self.buffer.version()
            episode.sampled += [(next(self.tokens), version) for _ in range(self.rng.randint(1, 3))]
            if ends:
                self.episodes.append(episode)

    def twice(self, send: Any, what: Any) -> None:
        """Now and then, as if the first answer had been lost."""
        for _ in range(1 + (self.rng.random() < 0.2)):
            send(what)

    def come_late(self, episode: Episode) -> None:
        """With what a lease that has expired by now, perhaps, brought home already or never did."""
        for cut in episode.sent:
            self.buffer.segment(episode.lease, *cut)
        if episode.sampled:
            self.buffer.complete(episode.lease, episode.bring(episode.lease))


def work(life: Life, name: str, birth: int) -> None:
    Worker(life, name, birth).run()


# The learner


class Durable:
    """What the checkpoint holds: a line for every step, and where they end."""

    def __init__(self, folder: Path) -> None:
        self.log, self.versions, self.path = (folder / x for x in ("trained.jsonl", "versions", "checkpoint.json"))
        self.saved: dict[str, Any] = {"step": 0, "version": 0, "repeats": [], "bytes": 0}
        if self.path.exists():
            self.saved = json.loads(self.path.read_text())

    def lines(self) -> Iterator[dict[str, Any]]:
        if self.log.exists():
            yield from map(json.loads, self.log.read_bytes()[: self.saved["bytes"]].splitlines())

    def published(self) -> dict[int, tuple[int, bool]]:
        """Every version whose weights were ever written to the disk: which one came before, and whether it is that."""
        rows = [line.split() for line in (self.versions.read_text().splitlines() if self.versions.exists() else [])]
        assert len({row[0] for row in rows}) == len(rows), "a version was published twice"
        return {int(version): (int(before), again == "1") for version, _, before, again in rows}

    def age(self, sampled: int, now: int) -> int:
        """Versions from the newest ancestor of `now` that is not newer than `sampled`."""
        age, ancestors = 0, self.published()
        while sampled < now:
            before, again = ancestors[now]
            age, now = age + (0 if again else now - before), before
        return age

    def save(self, **where: Any) -> None:
        half = self.path.with_suffix(".tmp")
        half.write_text(json.dumps(where))
        half.replace(self.path)
        self.saved = where


class Learner:
    """The first rank. Its calls to the buffer are those of learner/run.py, in the same order."""

    def __init__(self, life: Life, follower: Connection, birth: int) -> None:
        self.life, self.settings, self.follower = life, life.settings, follower
        self.rng = random.Random(f"learner {birth}")
        self.durable = Durable(life.folder)
        self.step, self.version = self.durable.saved["step"], self.durable.saved["version"]
        self.lineage = Lineage.of(self.durable.saved["repeats"])
        self.trained: dict[int, list[str]] = {line["step"]: line["ids"] for line in self.durable.lines()}
        self.claimed: dict[int, list[str]] = {}  # not yet committed
        self.restarts = 0
        self.buffer = ReplayBuffer(life.settings, self.reconcile)

    def recently_trained(self) -> dict[int, list[str]]:
        last = self.durable.saved["step"]
        return {step: self.trained[step] for step in range(max(1, last - 2 * CHECKPOINT_EVERY + 1), last + 1)}

    def reconcile(self) -> None:
        self.restarts += 1
        self.buffer.reconcile(self.claimed, self.recently_trained(), self.version, self.lineage)

    def run(self) -> None:
        self.log = self.durable.log.open("ab")
        self.log.truncate(self.durable.saved["bytes"])
        self.buffer.rewind(self.step, self.recently_trained(), self.version, self.lineage)
        self.publish(again=True)
        while True:
            self.train()

    def publish(self, again: bool = False) -> None:
        before = self.version
        self.version = self.buffer.next_version(max([before, *self.durable.published()]))
        with self.durable.versions.open("a") as file:
            print(self.version, self.step, before, int(again), file=file)
        self.pause()
        if again:
            self.lineage = self.lineage.repeat(self.version, before)
        self.lineage = self.lineage.within(self.settings.eta, self.version)
        self.buffer.publish(self.version, self.step, self.lineage)

    def train(self) -> None:
        step, restarts = self.step + 1, self.restarts
        ids = self.buffer.claim(step)
        if ids is None:
            self.buffer.wait(0.2)
            return
        self.claimed[step] = ids
        self.pause()
        self.follower.send((step, ids))
        facts, unreadable = read(self.buffer, ids[0::2])
        theirs, their_facts, their_unreadable = self.follower.recv()
        if theirs != ids:
            self.buffer.version()  # notices a restart
            assert self.restarts > restarts, f"step {step} is {ids} to one rank and {theirs} to the other"
        elif unreadable | their_unreadable:
            del self.claimed[step]
            self.pause()
            self.buffer.withdraw(step, unreadable | their_unreadable)
        else:
            self.take(step, ids, facts | their_facts)

    def take(self, step: int, ids: list[str], facts: dict[str, dict[str, Any]]) -> None:
        for attempt, fact in facts.items():
            staleness = self.lineage.age(fact["oldest"], self.version)
            assert staleness <= self.settings.eta, f"{attempt} lies {staleness} versions behind"
        line = {"step": step, "version": self.version, "ids": ids, "facts": facts}
        self.log.write(json.dumps(line).encode() + b"\n")
        self.log.flush()
        self.step, self.trained[step] = step, ids
        self.pause()
        self.publish()
        if step % CHECKPOINT_EVERY == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        self.pause()
        where = {"step": self.step, "version": self.version, "repeats": self.lineage.repeats}
        self.durable.save(**where, bytes=self.log.tell())
        self.pause()
        self.buffer.commit(self.step)
        if self.settings.archive:
            self.pause()
            self.buffer.archive(self.life.archive)
        self.claimed = {}

    def pause(self) -> None:
        """A moment in which it may die."""
        time.sleep(0.01 * self.rng.random())


def read(buffer: ReplayBuffer, ids: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What one rank sees of its share: facts of each attempt, or what cannot be read."""
    try:
        found = buffer.get(ids)
    except Unreadable as error:
        return {}, error.reasons
    facts = {}
    for one in found:
        home, sampled = tokens(one)
        facts[one.attempt] = {"home": home, "tokens": sampled, "oldest": one.oldest_version}
    return facts, {}


def tokens(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Those that came home in earlier segments, and those that this one brings."""
    (trace,) = trajectory.traces
    return trace.tokens[1:][~trace.sampled[1:]].tolist(), trace.tokens[trace.sampled].tolist()


def learn(life: Life, follower: Connection, birth: int) -> None:
    try:
        Learner(life, follower, birth).run()
    except (EOFError, ConnectionError):
        sys.exit(PEER_LOST)


def follow(life: Life, leader: Connection) -> None:
    """The second rank: claims the same step for itself and reads its share."""
    buffer = ReplayBuffer(life.settings)
    try:
        while True:
            step, ids = leader.recv()
            mine = buffer.claim(step)
            leader.send((mine, *(read(buffer, ids[1::2]) if mine == ids else ({}, {}))))
    except (EOFError, ConnectionError):
        sys.exit(PEER_LOST)


# The saboteur


def sabotage(life: Life, client: redis.Redis, birth: int) -> None:
    """Overwrites a payload now and then, as a broken disk or network would."""
    rng = random.Random(f"saboteur {birth}")
    with (life.folder / "sabotaged").open("a") as log:
        while True:
            time.sleep(rng.uniform(0.1, 0.5))
            try:
                names = sorted(client.keys("*:payload:*"))
                name = rng.choice(names) if names else b""
                blob = bytearray(client.get(name) or b"")
                if blob:
                    print(name.decode().split(":payload:")[1].rpartition(":")[0], file=log, flush=True)
                    at = rng.randrange(len(blob))
                    blob[at] ^= 1 << rng.randrange(8)
                    spoiled = rng.choice([blob, blob[:at], blob + b"!", b"", rng.randbytes(50)])
                    client.set(name, bytes(spoiled), xx=True, keepttl=True)
            except redis.RedisError:
                pass  # nothing to spoil while Redis is away
