"""The replay buffer: what attempts exist, who works on them, and what became of each.

Invariants, kept by life_cycle.lua (one atomic, idempotent step per transition; Redis runs them one at a time):

1. An attempt is in exactly one state, and created = trained + dropped + live at any moment.
2. Only the holder of an attempt's lease token can write to it: a worker that lost its lease is answered "gone".
3. `claim` never returns what is older than eta policy versions; new work begins only while fewer than
   (eta + 1) * batch_size groups are in flight.
4. The manifest of a learner step is made once and repeated to every rank and retry. It dies with `commit`, when a
   durable checkpoint holds its gradient; until then `rewind` can put it back. So each attempt is trained at most once.
5. A version id is never used twice, whatever is rewound.

Payloads never pass through Lua. A finished payload is first SET under a key that carries the lease token, expiring; the
transition that counts it makes it permanent. A crash between the two leaves nothing behind.

Redis must run with an append-only file and without eviction.
"""

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, Literal

import redis

from .codec import pack, unpack
from .connection import Connection
from .errors import CodecError, PayloadLost, RunTaken, StepCommitted
from .settings import BufferSettings
from .trajectory import Task, Trajectory

log = logging.getLogger(__name__)

READ_TOGETHER = 64  # payloads in one MGET
FORGET_TOGETHER = 1000  # keys in one UNLINK
UNCOUNTED_SECONDS = 3600  # a payload whose worker died between sending it and having it counted
PARTIAL_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one attempt until `deadline` (time.monotonic() of this process), longer with a heartbeat."""

    attempt: str
    token: str
    task: Task
    group: str
    group_size: int
    group_index: int
    tries: int
    deadline: float
    partial: bytes | None = None
    """The last checkpoint of an earlier try; `unpack` reads it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every attempt that was ever created is now."""

    created: int
    trained: int
    dropped: dict[str, int]
    live: dict[str, int]
    by_source: dict[str, dict[str, int]]
    """Per task source: created, trained, dropped, live."""

    @property
    def lost(self) -> int:
        return self.created - self.trained - sum(self.dropped.values()) - sum(self.live.values())

    @property
    def balanced(self) -> bool:
        """Nothing is lost, neither in all nor for any source, and the sources add up to the live sets."""
        rows = self.by_source.values()
        each = all(row["created"] == row["trained"] + row["dropped"] + row["live"] for row in rows)
        return self.lost == 0 and each and sum(row["live"] for row in rows) == sum(self.live.values())


class ReplayBuffer:
    """One run's buffer. Synchronous and thread-safe; every call waits for a Redis that is away, up to a deadline.

    `on_restart` is called when Redis came back with another run_id, before anything else reaches it: the learner calls
    `reconcile` there, because a Redis that lost power has forgotten its last second.
    """

    def __init__(self, settings: BufferSettings, on_restart: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._connection = Connection(settings, on_restart)
        self._script = self._connection.script(files(__package__).joinpath("life_cycle.lua").read_text())
        self._prefix = f"{{{settings.run}}}:"
        self._rules = (settings.eta, settings.batch_size, int(settings.lease_seconds * 1000), settings.max_tries)
        self._heard = "0-0"

    # The run as a whole

    def claim_run(self, identity: str) -> None:
        """Makes the run's keys those of `identity`; RunTaken if they are somebody else's of the same name."""
        name = f"{self._prefix}identity"
        self._connection.call("claim_run", lambda r: r.set(name, identity, nx=True))
        owner: Any = self._connection.call("claim_run", lambda r: r.get(name))
        if owner is not None and owner.decode() != identity:
            raise RunTaken(
                f"Redis at {self._connection.where} already holds another run {self._settings.run!r}: choose another "
                "name=, or delete that run there and start over with --fresh"
            )

    def forget(self) -> None:
        """Deletes everything of this run, in slices, because others may share this Redis."""
        position = -1
        while position != 0:
            scan = partial(redis.Redis.scan, cursor=max(position, 0), match=f"{self._prefix}*", count=FORGET_TOGETHER)
            answer: Any = self._connection.call("forget", scan)
            position, names = answer
            if names:
                self._connection.call("forget", lambda r, names=names: r.unlink(*names))  # type: ignore[misc]

    # Admission

    def put_tasks(self, source: Callable[[int], Task], limit: int) -> int:
        """Create up to `limit` groups while the staleness bound has room for them; returns how many.

        `source` is asked for the tasks that follow the last one created, by anybody, ever: their number lives in Redis.
        It must give the same task for the same index, in every process.
        """
        created = 0
        while created < limit:
            index, room = self._run("next_index")
            wanted = min(limit - created, room)
            if wanted <= 0:
                break
            tasks = [source(i) for i in range(index, index + wanted)]
            rows = [(task.source, json.dumps([task.id, task.source, task.seed])) for task in tasks]
            created += max(0, self._run("create", index, self._settings.group_size, json.dumps(rows)))
        return created

    # Work

    def lease(self, worker: str, n: int) -> list[Lease]:
        """Up to `n` attempts to work on, oldest task first; those of workers that fell silent come back this way."""
        if n <= 0:
            return []
        token = uuid.uuid4().hex
        deadline = time.monotonic() + self._settings.lease_seconds
        rows = json.loads(self._run("lease", worker, n, token))
        partials = iter(self._blobs([row[5] for row in rows if row[5]]))
        return [
            Lease(
                attempt=attempt,
                token=token,
                task=Task(*json.loads(task)),
                group=group,
                group_size=size,
                group_index=int(attempt.rpartition("/")[2]),
                tries=tries,
                deadline=deadline,
                partial=next(partials) if partial else None,
            )
            for attempt, group, size, task, tries, partial in rows
        ]

    def heartbeat(self, leases: Iterable[Lease]) -> list[Lease]:
        """Extend the leases; returns those still held, with their new deadline. Stop working on the others."""
        leases = list(leases)
        deadline = time.monotonic() + self._settings.lease_seconds
        held = self._run("heartbeat", json.dumps([(lease.attempt, lease.token) for lease in leases]))
        return [replace(lease, deadline=deadline) for lease, yes in zip(leases, held) if yes]

    def checkpoint(self, lease: Lease, trajectory: Trajectory) -> bool:
        """Keep what there is so far, for the next try should this one break off; False if the lease is lost."""
        _check_belongs(trajectory, lease)
        name = self._blob_name("partial", lease)
        blob = pack(trajectory)
        self._connection.call("checkpoint", lambda r: r.set(name, blob, ex=PARTIAL_SECONDS))
        return self._run("checkpoint", lease.attempt, lease.token, name, _or_empty(trajectory.oldest_version)) == b"ok"

    def complete(self, lease: Lease, trajectory: Trajectory) -> Literal["ok", "gone", "duplicate"]:
        """Bring the finished trajectory home. Keep it until this returns.

        gone: the lease was lost, and somebody else has the attempt. duplicate: it was already home, from this lease.
        """
        _check_belongs(trajectory, lease)
        name = self._blob_name("payload", lease)
        blob = pack(trajectory)
        oldest = _or_empty(trajectory.oldest_version)
        while True:
            # not over an older copy: that one may already count, and must not begin to expire
            self._connection.call("complete", lambda r: r.set(name, blob, ex=UNCOUNTED_SECONDS, nx=True))
            answer = self._run("complete", lease.attempt, lease.token, name, oldest).decode()
            if answer != "resend":  # Redis came back without the payload
                return answer

    def fail(self, lease: Lease, reason: str, detail: str = "") -> Literal["requeued", "dropped", "gone"]:
        """The infrastructure failed, not the agent: try again, up to max_tries, then drop it as env_failed."""
        note = {"time": time.time(), "attempt": lease.attempt, "tries": lease.tries, "reason": reason}
        return self._run("fail", lease.attempt, lease.token, json.dumps(note | {"detail": detail[:500]})).decode()

    def release(self, lease: Lease) -> None:
        """Hand the attempt back, with its last checkpoint and without counting a try: this worker is leaving."""
        self._run("release", lease.attempt, lease.token)

    # Learning

    def claim(self, step: int) -> list[str] | None:
        """The attempts of this learner step, by group, oldest first; None while fewer than batch_size groups are ready.

        Asked again, by any rank, after any crash, it answers the same until `commit` or `rewind`.
        """
        answer = self._run("claim", step)
        if answer == b"committed":
            raise StepCommitted(
                f"step {step} of run {self._settings.run} is in a durable checkpoint: is there a second learner?"
            )
        return json.loads(answer) if answer is not None else None

    def get(self, ids: list[str]) -> list[Trajectory]:
        """The trajectories of these attempts, in this order."""
        names = [name.decode() for name in self._run("payloads", json.dumps(ids))]
        blobs = self._blobs(names)
        missing = [attempt for attempt, blob in zip(ids, blobs) if blob is None]
        if missing:
            raise PayloadLost(f"no payload for {missing}: restart the learner, so that they are run again")
        return [_unpack(attempt, blob) for attempt, blob in zip(ids, blobs) if blob is not None]

    def publish(self, version: int, trained_step: int) -> None:
        """`version` is the current policy now: steps up to `trained_step` make room, what became too old is dropped."""
        self._run("publish", version, trained_step)

    def commit(self, step: int) -> None:
        """A durable checkpoint holds every step up to `step`: their attempts are trained, their payloads go."""
        while self._run("commit", step):
            pass

    def rewind(self, step: int, recently_trained: list[str]) -> int:
        """A learner starts from the checkpoint of `step` (0: none): what was claimed later is ready again.

        `recently_trained` are the attempts that the checkpoint's last two intervals trained. Redis may have forgotten
        that they were claimed. Publish the checkpoint's weights under a `next_version` afterwards.
        """
        self._drop_torn_transaction()
        self.commit(step)
        return self._run("rewind", step, json.dumps(recently_trained))

    def reconcile(self, manifests: dict[int, list[str]], recently_trained: list[str], version: int) -> None:
        """Redis was restarted under a living learner: tell it what it may have forgotten.

        `manifests` are all steps claimed and not yet committed, the one being read included; `recently_trained` as in
        `rewind`. A claim that Redis knows and the learner does not is undone.
        """
        self._drop_torn_transaction()
        self._run("reconcile", json.dumps(manifests), json.dumps(recently_trained), version)

    def next_version(self, at_least: int = 0) -> int:
        """A version id above every one that was issued or published, and above `at_least`."""
        return self._run("next_version", at_least)

    def version(self) -> int:
        """The current policy version."""
        return self._run("version")

    # Questions

    def ledger(self) -> Ledger:
        """Where every attempt is, at one instant."""
        live, flat = self._run("ledger")
        return _to_ledger(json.loads(live), dict(zip(flat[0::2], map(int, flat[1::2]))))

    def state(self, attempt: str) -> str | None:
        """queued, leased, ready, claimed, trained:<step> or dropped:<reason>; None if there is no such attempt."""
        answer = self._run("state", attempt)
        return None if answer is None else answer.decode()

    def stats(self) -> dict[str, Any]:
        """Numbers to watch: states, room, staleness of what is claimable (staleness -> groups), failures, memory."""
        stats = json.loads(self._run("stats"))
        memory: Any = self._connection.call("stats", lambda r: r.info("memory"))
        staleness = Counter(max(0, stats["version"] - v) for v in stats.pop("complete_versions"))
        return stats | {
            "staleness": dict(sorted(staleness.items())),
            "failures": [json.loads(note) for note in stats["failures"]],
            "memory_bytes": memory["used_memory"],
            "memory_limit_bytes": memory["maxmemory"],
        }

    def wait(self, timeout: float) -> None:
        """Return as soon as something may have become claimable or leasable, or there is room; after `timeout` anyway.

        It is a hint: events since the last `wait` of this object count, and the caller looks for itself.
        """
        bell = self._run("bell").decode()
        if self._connection.wait_for_entry("wait", bell, self._heard, time.monotonic() + timeout):
            self._heard = self._connection.last_entry("wait", bell)

    def close(self) -> None:
        self._connection.close()

    def _drop_torn_transaction(self) -> None:
        """A power cut can tear a script's writes in the append-only file. Redis starts without them, and yet keeps what
        is left of them in the file: a later restart would apply that part. Rewriting the file gets rid of it."""
        try:
            self._connection.call("rewrite", lambda r: r.bgrewriteaof())
        except redis.ResponseError as error:  # it may be forbidden, or under way
            log.warning("Redis does not rewrite its file (%s); after a power cut run redis-check-aof --fix", error)

    def _run(self, transition: str, *args: Any) -> Any:
        connection = self._connection
        return self._script(transition, [self._prefix], lambda: [transition, *self._rules, connection.run_id, *args])

    def _blob_name(self, kind: str, lease: Lease) -> str:
        return f"{self._prefix}{kind}:{lease.attempt}:{lease.token}"

    def _blobs(self, names: list[str]) -> list[bytes | None]:
        blobs: list[bytes | None] = []
        for i in range(0, len(names), READ_TOGETHER):
            some = names[i : i + READ_TOGETHER]
            blobs += self._connection.call("get", lambda r, some=some: r.mget(some))  # type: ignore[misc]
        return blobs


def _check_belongs(trajectory: Trajectory, lease: Lease) -> None:
    theirs = (trajectory.attempt, trajectory.group, trajectory.group_size, trajectory.group_index)
    ours = (lease.attempt, lease.group, lease.group_size, lease.group_index)
    if theirs != ours:
        raise ValueError(f"the trajectory says attempt, group, size, index = {theirs}, the lease says {ours}")


def _unpack(attempt: str, blob: bytes) -> Trajectory:
    try:
        return unpack(blob)
    except CodecError as error:
        error.add_note(f"in the payload of attempt {attempt}")
        raise


def _or_empty(version: int | None) -> int | str:
    return "" if version is None else version


def _to_ledger(live: dict[str, int], counts: dict[bytes, int]) -> Ledger:
    created = trained = 0
    dropped: Counter[str] = Counter()
    by_source: dict[str, Counter[str]] = {}
    for field, count in counts.items():
        what, _, source = field.decode().partition("|")
        row = by_source.setdefault(source, Counter(created=0, trained=0, dropped=0, live=0))
        if what == "created":
            created += count
            row["created"] += count
        elif what == "trained":
            trained += count
            row["trained"] += count
        elif what.startswith("dropped:"):
            dropped[what.removeprefix("dropped:")] += count
            row["dropped"] += count
        else:
            row["live"] += count
    return Ledger(created, trained, dict(dropped), live, {source: dict(row) for source, row in by_source.items()})
