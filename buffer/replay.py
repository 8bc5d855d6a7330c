"""The replay buffer: what attempts exist, who works on them, and what became of each.

Invariants, kept by life_cycle/*.lua (one atomic, idempotent step per transition; Redis runs them one at a time):

1. An attempt is in exactly one state, and created = trained + dropped + live at any moment.
2. Only the holder of an attempt's lease token can write to it: a worker that lost its lease is answered "gone".
3. `claim` never returns what is older than eta policy versions; new work begins only while fewer than
   (eta + 1) * batch_size groups are in flight. Versions count along the learner's lineage (lineage.py).
4. The manifest of a learner step is made once and repeated to every rank and retry. It dies with `commit`, when a
   durable checkpoint holds its gradient; until then `rewind` can put it back. So each attempt is trained at most once
   (max_uses times, where that is set).
5. A version id is never used twice, whatever is rewound.

Payloads never pass through Lua. A finished payload is first SET under a key that carries the lease token, expiring; the
transition that counts it makes it permanent. A crash between the two leaves nothing behind.

Redis must run with an append-only file and without eviction.
"""

import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import redis

from .archive import SUFFIX, write_blobs
from .codec import check, pack, unpack
from .connection import Connection
from .errors import CodecError, LearnerReplaced, RedisRefused, RunTaken, StepCommitted, Unreadable, UnsafeRedis
from .ledger import Ledger, Story, outcome, to_ledger, to_story
from .lineage import Lineage
from .memory import Memory
from .selection import Candidate, load_weight, sample
from .settings import BufferSettings
from .trajectory import Task, Trajectory

log = logging.getLogger(__name__)

# Of life_cycle/: each subject is a script of its own, with what it needs besides. Redis makes a script's functions anew
# at each call, which for one script of all subjects would be a third of the time.
SCRIPTS = {
    "admission": ("attempts", "groups"),
    "work": ("attempts", "groups"),
    "arrival": ("attempts", "groups"),
    "claiming": ("attempts", "manifests"),
    "learning": ("attempts", "groups", "manifests"),
    "questions": ("attempts", "groups"),
}
READ_TOGETHER = 64  # payloads in one MGET...
READ_BYTES = 1 << 20  # ...and no more than this: pipelining helps small payloads and hinders large ones
TOKEN_BYTES, SLACK_BYTES = 9, 512  # of the arrays that unpack makes beside the payload
FORGET_TOGETHER = 1000  # keys in one UNLINK
ARCHIVE_TOGETHER = 256  # payloads in one file
UNCOUNTED_SECONDS = 3600  # a payload whose worker died between sending it and having it counted
PARTIAL_SECONDS = 24 * 3600
NOTHING_SAMPLED = 1 << 40
PRESSED = 0.9  # of maxmemory: time to free what can be freed

NO_REPEATS = Lineage()

SetCommand = tuple[str, bytes, tuple[Any, ...]]  # a name, its new value, and options of Redis' SET


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one attempt for `lease_seconds`, and as long again from each heartbeat."""

    attempt: str
    token: str
    task: Task
    group: str
    group_size: int
    group_index: int
    tries: int
    segments: int = 0
    """How many segments of it came home, by whatever try."""
    partial: Trajectory | None = None
    """The last checkpoint of an earlier try, to go on from."""

    def piece(self, number: int) -> "Lease":
        """The same lease under the name of the attempt's segment `number`, from 1."""
        group = f"{self.group}:{number}"
        return replace(self, attempt=f"{group}/0", group=group)


class ReplayBuffer:
    """One run's buffer. Synchronous and thread-safe; every call waits for a Redis that is away, up to a deadline.

    `on_restart` is called when Redis came back with another run_id, before anything else reaches it: the learner calls
    `reconcile` there, because a Redis that lost power has forgotten its last second.
    """

    def __init__(self, settings: BufferSettings, on_restart: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._connection = Connection(settings, on_restart)
        self._prefix = f"{{{settings.run}}}:"
        self._scripts: dict[str, Callable[..., Any]] = {}  # by transition
        for subject, needs in SCRIPTS.items():
            source = _rules(settings) + "".join(map(_lua, (*needs, subject, "call")))
            script = self._connection.script(source.replace("{run}:", self._prefix))
            transitions = re.findall(r"^function transitions\.(\w+)", _lua(subject), re.MULTILINE)
            self._scripts |= dict.fromkeys(transitions, script)
        self._weight = load_weight(settings.order)
        self._learner: int | str = ""  # our number, once we are one
        self._heard = "0-0"

    # The run as a whole

    def claim_run(self, identity: str) -> None:
        """Makes the run's keys those of `identity`; RunTaken if they are somebody else's of the same name, and
        UnsafeRedis if this Redis throws keys away when it is full."""
        self._check_server()
        name = f"{self._prefix}identity"
        self._connection.call("claim_run", lambda r: r.set(name, identity, nx=True))
        owner: Any = self._connection.call("claim_run", lambda r: r.get(name))
        if owner is not None and owner.decode() != identity:
            raise RunTaken(
                f"Redis at {self._connection.where} already holds another run {self._settings.run!r}: choose another "
                "name=, or delete that run there and start over with --fresh"
            )

    def _check_server(self) -> None:
        self._connection.call("claim_run", lambda r: r.ping())  # while it reads its file, it says that it has none
        server: Any = self._connection.call("claim_run", lambda r: r.info("memory") | r.info("persistence"))
        where = f"Redis at {self._connection.where}"
        if (policy := server["maxmemory_policy"]) != "noeviction":
            raise UnsafeRedis(f"{where} evicts keys when it is full ({policy}): set maxmemory-policy noeviction")
        if not server["aof_enabled"]:
            log.warning("%s has no append-only file: set appendonly yes, or a restart of it loses the run", where)

    def forget(self) -> None:
        """Deletes everything of this run, in slices, because others may share this Redis."""
        position = 0
        while True:
            scan = partial(redis.Redis.scan, cursor=position, match=f"{self._prefix}*", count=FORGET_TOGETHER)
            answer: Any = self._connection.call("forget", scan)
            position, names = answer
            if names:
                self._connection.call("forget", lambda r, names=names: r.unlink(*names))  # type: ignore[misc]
            if position == 0:
                return

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
            rows = [(task.source, _label(task), json.dumps([task.id, task.source, task.seed])) for task in tasks]
            created += max(0, self._run("create", index, self._settings.group_size, json.dumps(rows)))
        return created

    # Work

    def lease(self, worker: str, n: int, token: str | None = None) -> list[Lease]:
        """Up to `n` attempts to work on, oldest task first; those of workers that fell silent come back this way.

        Asked again with the same `token`, within the time of a lease, it answers the same.
        """
        if n <= 0:
            return []
        token = token or uuid.uuid4().hex
        rows = json.loads(self._run("lease", worker, n, token))
        partials = iter(self._blobs([(row[6], 0) for row in rows if row[6]]))
        leases = [
            Lease(
                attempt=attempt,
                token=token,
                task=Task(*json.loads(task)),
                group=group,
                group_size=size,
                group_index=int(attempt.rpartition("/")[2].partition(".")[0]),
                tries=tries,
                segments=segments,
            )
            for attempt, group, size, task, tries, segments, _ in rows
        ]
        return [self._resumed(lease, next(partials)) if row[6] else lease for lease, row in zip(leases, rows)]

    def _resumed(self, lease: Lease, blob: memoryview | None) -> Lease:
        try:
            return replace(lease, partial=unpack(blob or b""))
        except CodecError as error:
            self.start_over(lease, repr(error) if blob is not None else "its checkpoint is not in Redis")
            return lease

    def abandon(self, worker: str) -> int:
        """A worker starts under this name: take back what its predecessor still holds; returns how many attempts."""
        return self._run("abandon", worker)

    def heartbeat(self, leases: Iterable[Lease], oldest: Mapping[str, int] | None = None) -> list[Lease]:
        """Extend the leases; returns those still held. Stop working on the others.

        `oldest` says which version sampled an attempt's oldest token so far: where too_old is "cancel", what is beyond
        the staleness bound is dropped here instead of at its end.
        """
        leases, oldest = list(leases), oldest or {}
        rows = [
            [lease.attempt, lease.token, *([oldest[a]] if (a := lease.attempt) in oldest else [])] for lease in leases
        ]
        held = self._run("heartbeat", json.dumps(rows))
        return [lease for lease, yes in zip(leases, held) if yes]

    def checkpoint(self, lease: Lease, trajectory: Trajectory) -> bool:
        """Keep what there is so far, for the next try should this one break off; False if the lease is lost."""
        _check_belongs(trajectory, lease)
        partial = self._partial(lease, trajectory)
        who = (lease.attempt, lease.token)
        return self._bring([partial], "checkpoint", *who, partial[0], _sampled(trajectory)) == "ok"

    def start_over(self, lease: Lease, reason: str) -> None:
        """The lease's partial cannot be continued: the ledger notes it, and the partial goes."""
        log.warning("attempt %s starts over: %s", lease.attempt, reason)
        self._run("start_over", lease.attempt, lease.token, _report(lease, "starts over", reason))

    def segment(
        self, lease: Lease, number: int, piece: Trajectory, so_far: Trajectory
    ) -> Literal["ok", "gone", "duplicate"]:
        """Bring home segment `number` of an unfinished episode, and the checkpoint that goes on from it, in one step.

        `piece` becomes claimable at once, before the episode ends; of one episode earlier segments are claimed first.
        Numbers grow from lease.segments + 1. Only for groups of one.
        """
        if lease.group_size > 1:
            raise ValueError(
                f"attempt {lease.attempt} is one of {lease.group_size}: groups cannot come home in segments"
            )
        name = lease.piece(number)
        _check_belongs(piece, name)
        _check_belongs(so_far, lease)
        payload, partial = self._payload(name, piece), self._partial(lease, so_far)
        names = (payload[0], partial[0], _sampled(so_far))
        facts = _facts(piece, payload[1])
        return self._bring([payload, partial], "segment", lease.attempt, lease.token, number, *names, *facts)

    def complete(self, lease: Lease, trajectory: Trajectory) -> Literal["ok", "gone", "duplicate"]:
        """Bring the finished trajectory home. Keep it until this returns.

        gone: the lease was lost, and somebody else has the attempt. duplicate: it was already home, from this lease.
        """
        _check_belongs(trajectory, lease)
        payload = self._payload(lease, trajectory)
        return self._bring(
            [payload], "complete", lease.attempt, lease.token, payload[0], *_facts(trajectory, payload[1])
        )

    def fail(self, lease: Lease, reason: str, detail: str = "") -> Literal["requeued", "dropped", "gone"]:
        """The infrastructure failed, not the agent: try again, up to max_tries, then drop it as env_failed."""
        return self._run("fail", lease.attempt, lease.token, _report(lease, reason, detail)).decode()

    def release(self, lease: Lease) -> None:
        """Hand the attempt back, with its last checkpoint and without counting a try: this worker is leaving."""
        self._run("release", lease.attempt, lease.token)

    # Learning

    def claim(self, step: int) -> list[str] | None:
        """The attempts of this learner step, by group; None while fewer than batch_size groups are ready.

        Asked again, by any rank, after any crash, it answers the same until `commit`, `rewind` or `withdraw`. An
        attempt that pads its group is there more than once.
        """
        if self._weight is None:
            answer = self._learn("claim", step, self._settings.order, "[]")
        elif (answer := self._learn("claim", step, "chosen", "[]")) is None:  # is not made yet
            seed = f"{self._settings.run} {step}"
            chosen = sample(self.candidates(), self._settings.batch_size, self._weight, seed)
            answer = self._learn("claim", step, "chosen", json.dumps(chosen))
        if answer == b"committed":
            raise StepCommitted(
                f"step {step} of run {self._settings.run} is in a durable checkpoint: is there a second learner?"
            )
        return json.loads(answer)["ids"] if answer is not None else None

    def candidates(self) -> list[Candidate]:
        """What can be claimed now, oldest first."""
        rows = json.loads(self._run("candidates"))
        return [Candidate(*facts) for facts in rows]

    def get(self, ids: list[str]) -> list[Trajectory]:
        """The trajectories of these attempts, in this order. Unreadable names those whose payload is missing or
        corrupt: `withdraw` them, and claim the step again."""
        wanted = list(dict.fromkeys(ids))
        payloads = [(name.decode(), size, tokens) for name, size, tokens in self._run("payloads", json.dumps(wanted))]
        memory = Memory(sum(size + TOKEN_BYTES * tokens + SLACK_BYTES for _, size, tokens in payloads))
        blobs = self._blobs([(name, size) for name, size, _ in payloads], memory)
        found: dict[str, Trajectory] = {}
        unreadable: dict[str, str] = {}
        for attempt, blob in zip(wanted, blobs):
            try:
                if blob is None:
                    unreadable[attempt] = "missing"
                elif (trajectory := unpack(blob, memory)).attempt == attempt:
                    found[attempt] = trajectory
                else:
                    unreadable[attempt] = f"it is of attempt {trajectory.attempt}"
            except CodecError as error:
                unreadable[attempt] = f"{type(error).__name__}: {error}"
        if unreadable:
            raise Unreadable(unreadable)
        return [found[attempt] for attempt in ids]

    def withdraw(self, step: int, unreadable: Mapping[str, str]) -> None:
        """Some payloads of this step cannot be read: what is corrupt is dropped (rejected) and kept aside, what is
        missing is run again, and the next `claim` makes the step anew. No rank may have trained on it."""
        log.error("step %d is claimed anew without %s", step, dict(unreadable))
        self._learn("withdraw", step, json.dumps(list(unreadable)))

    def publish(self, version: int, trained_step: int, lineage: Lineage = NO_REPEATS) -> None:
        """`version` is the current policy now: steps up to `trained_step` make room, what became too old is dropped.

        `lineage` says what it repeats, if the learner started again.
        """
        self._learn("publish", version, trained_step, json.dumps(lineage.repeats))

    def commit(self, step: int) -> None:
        """A durable checkpoint holds every step up to `step`: their attempts are trained, their payloads go."""
        while self._learn("commit", step):
            pass

    def rewind(
        self,
        step: int,
        recently_trained: Mapping[int, list[str]],
        version: int = 0,
        lineage: Lineage = NO_REPEATS,
    ) -> int:
        """A learner starts from the checkpoint of `step` (0: none): what was claimed later is ready again.

        `recently_trained` are the manifests of the checkpoint's last two intervals, which Redis may have forgotten;
        `version` and `lineage` its own. Publish its weights under a `next_version` afterwards, which repeats `version`.
        A learner that was started before, and still lives, gets LearnerReplaced from now on.
        """
        self._drop_torn_transaction()
        newest = self.version()  # and what came after `version` is lost
        lineage = lineage.repeat(newest, version) if newest > version else lineage
        self._run("believe", json.dumps(recently_trained), json.dumps(lineage.repeats))
        self.commit(step)
        back, self._learner = self._run("rewind", step)
        return back

    def leave(self) -> None:
        """The learner was asked to stop: should it be killed before its step is done, that was no attempt's fault."""
        self._run("leave")

    def reconcile(
        self,
        manifests: Mapping[int, list[str]],
        recently_trained: Mapping[int, list[str]],
        version: int,
        lineage: Lineage = NO_REPEATS,
    ) -> None:
        """Redis was restarted under a living learner: tell it what it may have forgotten.

        `manifests` are all steps claimed and not yet committed, the one being read included; `recently_trained` as in
        `rewind`. A claim that Redis knows and the learner does not is undone.
        """
        self._drop_torn_transaction()
        committed = max(recently_trained, default=0)
        self._learn("believe", json.dumps(recently_trained), json.dumps(lineage.repeats))
        self._learn("reconcile", committed, json.dumps(manifests), version)
        self.commit(committed)

    def next_version(self, at_least: int = 0) -> int:
        """A version id above every one that was issued or published, and above `at_least`."""
        return self._run("next_version", at_least)

    def version(self) -> int:
        """The current policy version."""
        return self._run("version")

    def archive(self, folder: Path) -> int:
        """Write what was trained or dropped since the last call to files in `folder`; returns how many trajectories.

        Only then do their payloads leave Redis. A file is named by the number of its first trajectory, so that a crash
        in between writes the same file again instead of a second copy.
        """
        written = 0
        while True:
            first, rows = self._run("outbox", ARCHIVE_TOGETHER)
            if not rows:
                return written
            entries = [row.decode().split("|", 2) for row in rows]
            blobs = self._blobs([(payload, 0) for _, _, payload in entries])
            kept = []
            for (attempt, became, _), value in zip(entries, blobs):
                blob = bytes(value or b"")
                try:
                    check(blob)
                    state = self.state(attempt) if became == "trained" else became
                    kept.append((blob, state or became))
                except CodecError as error:
                    log.error("attempt %s (%s) is not archived: %s", attempt, became, error)
            folder.mkdir(parents=True, exist_ok=True)
            for unacknowledged in folder.glob(f"*{SUFFIX}"):  # of before a power cut in which Redis forgot it
                if int(unacknowledged.stem) > first:
                    unacknowledged.unlink()
            write_blobs(folder / f"{first:012d}{SUFFIX}", kept)
            self._run("archived", first, json.dumps([payload for _, _, payload in entries]))
            written += len(kept)

    # Questions

    def ledger(self) -> Ledger:
        """Where every attempt is, at one instant."""
        live, flat = self._run("ledger")
        return to_ledger(json.loads(live), {name.decode(): int(n) for name, n in zip(flat[0::2], flat[1::2])})

    def story(self, attempt: str) -> Story | None:
        """Everything that happened to an attempt; None if there is no such attempt."""
        answer = self._run("story", attempt)
        return None if answer is None else to_story(attempt, answer)

    def state(self, attempt: str) -> str | None:
        """queued, leased, ready, claimed, trained:<step> or dropped:<reason>; None if there is no such attempt."""
        answer = self._run("story", attempt)
        return None if answer is None else answer[0].decode() or outcome(answer[2].decode())

    def aside(self, attempt: str) -> bytes | None:
        """The payload or partial of an attempt that was poisoned or rejected; None if it is not kept (any more)."""
        names = dict(row.split("|", 1) for row in json.loads(self._run("stats"))["aside"])
        (blob,) = self._blobs([(names.get(attempt, ""), 0)])
        return None if blob is None else bytes(blob)

    def pressed(self) -> bool:
        """Whether Redis is so full that what a checkpoint frees is needed now."""
        memory: Any = self._connection.call("pressed", lambda r: r.info("memory"))
        return 0 < PRESSED * memory["maxmemory"] < memory["used_memory"]

    def stats(self) -> dict[str, Any]:
        """Numbers to watch: states, room, staleness of what is claimable (staleness -> groups) and of what was trained
        (see `staleness_trained`: versions and seconds in flight and in the queue), failures, memory."""
        stats = json.loads(self._run("stats"))
        memory: Any = self._connection.call("stats", lambda r: r.info("memory"))
        lineage = Lineage.of(stats.pop("lineage"))
        staleness = Counter(lineage.age(v, stats["version"]) for v in stats.pop("complete_versions"))
        return stats | {
            "staleness_trained": _distribution(list(stats["staleness"])),
            "staleness": dict(sorted(staleness.items())),
            "failures": [json.loads(note) for note in stats["failures"]],
            "aside": [row.partition("|")[0] for row in stats["aside"]],
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
        except (redis.ResponseError, RedisRefused) as error:  # it may be forbidden, or under way
            log.warning("Redis does not rewrite its file (%s); after a power cut run redis-check-aof --fix", error)

    def _run(self, transition: str, *args: Any) -> Any:
        return self._send([], transition, *args)

    def _learn(self, transition: str, *args: Any) -> Any:
        answer = self._run(transition, *args)
        if answer == b"replaced":
            raise LearnerReplaced(
                f"another learner of run {self._settings.run} was started after this one: only one may train it"
            )
        return answer

    def _send(self, blobs: list[SetCommand], transition: str, *args: Any) -> Any:
        """The transition, and in the same breath before it the blobs that it counts."""
        connection = self._connection
        return self._scripts[transition](
            transition,
            [self._prefix],
            lambda: [transition, connection.run_id, self._learner, *args],
            [("SET", name, blob, *options) for name, blob, options in blobs],
        )

    def _bring(self, blobs: list[SetCommand], transition: str, *args: Any) -> Any:
        while True:
            answer = self._send(blobs, transition, *args).decode()
            if answer != "resend":  # Redis came back without the payload
                return answer

    def _payload(self, lease: Lease, trajectory: Trajectory) -> SetCommand:
        # NX: not over an older copy, which may already count and must not begin to expire
        name = f"{self._prefix}payload:{lease.attempt}:{lease.token}"
        return name, pack(trajectory, self._settings.compresses), ("EX", UNCOUNTED_SECONDS, "NX")

    def _partial(self, lease: Lease, trajectory: Trajectory) -> SetCommand:
        # a name of its own each time: what a lost lease sends must not replace what its successor goes on from
        name = f"{self._prefix}partial:{lease.attempt}:{uuid.uuid4().hex}"
        return name, pack(trajectory, self._settings.compresses), ("EX", PARTIAL_SECONDS)

    def _blobs(self, wanted: Sequence[tuple[str, int]], memory: Memory | None = None) -> list[memoryview | None]:
        """The values of these (name, bytes), in `memory`; None for a name that is gone."""
        blobs: list[memoryview | None] = []
        some: list[str] = []
        size = 0
        for i, (name, bytes_) in enumerate(wanted, 1):
            some.append(name)
            size += bytes_
            if len(some) == READ_TOGETHER or size >= READ_BYTES or i == len(wanted):
                blobs += self._connection.values("get", some, memory or Memory())
                some, size = [], 0
        return blobs


def _rules(settings: BufferSettings) -> str:
    """What the life cycle needs of the settings, as a table of Lua."""
    rules = {
        "eta": settings.eta,
        "batch_size": settings.batch_size,
        "lease_ms": int(settings.lease_seconds * 1000),
        "max_tries": settings.max_tries,
        "max_uses": settings.max_uses,
        "replace": settings.group_failures == "replace",
        "cancel": settings.too_old == "cancel",
        "archive": settings.archive,
    }
    return "local rules = { " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in rules.items()) + " } "


def _lua(name: str) -> str:
    return files(__package__).joinpath("life_cycle", f"{name}.lua").read_text()


def _sampled(trajectory: Trajectory) -> int:
    """The oldest version of a partial; one of which nothing was sampled never gets too old."""
    oldest = trajectory.oldest_version
    return NOTHING_SAMPLED if oldest is None else oldest


def _check_belongs(trajectory: Trajectory, lease: Lease) -> None:
    theirs = (trajectory.attempt, trajectory.group, trajectory.group_size, trajectory.group_index)
    ours = (lease.attempt, lease.group, lease.group_size, lease.group_index)
    if theirs != ours:
        raise ValueError(f"the trajectory says attempt, group, size, index = {theirs}, the lease says {ours}")


def _report(lease: Lease, reason: str, detail: str) -> str:
    """A line in the list of the last failures."""
    report = {"time": time.time(), "attempt": lease.attempt, "tries": lease.tries}
    return json.dumps(report | {"reason": reason, "detail": detail[:500]})


def _or_empty(version: int | None) -> int | str:
    return "" if version is None else version


def _facts(trajectory: Trajectory, blob: bytes) -> tuple[Any, ...]:
    """What the life cycle keeps of a trajectory that came home."""
    oldest, newest = _or_empty(trajectory.oldest_version), _or_empty(trajectory.newest_version)
    return oldest, newest, trajectory.reward, trajectory.n_tokens, len(blob)


def _label(task: Task) -> str:
    """The task as stories keep it, after its source."""
    return str(task.seed) if task.id == f"{task.source}/{task.seed}" else f"{task.seed}:{json.dumps(task.id)}"


def _distribution(flat: list[str]) -> dict[str, dict[float, int]]:
    """Staleness of trained attempts in flight, in the queue, in all -> versions, or seconds below which -> number."""
    found: dict[str, dict[float, int]] = {}
    for name, count in zip(flat[0::2], flat[1::2]):
        which, _, bucket = name.partition("|")
        at = 2.0 ** int(bucket) if which.endswith("_seconds") else int(bucket)
        found.setdefault(which, {})[at] = int(count)
    return {which: dict(sorted(buckets.items())) for which, buckets in sorted(found.items())}
