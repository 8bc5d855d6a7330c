"""The life cycle against a model of it in plain Python: any sequence of calls leaves both in the same state.

MODEL_EXAMPLES=1000 tries more of them.
"""

import os
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from argosy.buffer import BufferSettings, Lease, Lineage, ReplayBuffer, Task, Trajectory, Unreadable, read_archive
from argosy.buffer.errors import StepCommitted
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

sys.path.append(str(Path(__file__).parent))
import books

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "30"))
LIVE = ("queued", "leased", "ready", "claimed")
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "single": {"too_old": "cancel", "order": "freshest"},
    "pad": {"group_size": 3, "archive": True},
    "replace": {"group_size": 2, "group_failures": "replace"},
    "reuse": {"group_size": 2, "max_uses": 2, "archive": True},
    "segments": {"archive": True},
}


@dataclass
class Attempt:
    group: str
    source: str
    state: str = "queued"
    failures: int = 0
    crashes: int = 0
    lease: Lease | None = None
    """The one that holds it, or that brought it home."""
    worker: str = ""
    expired: bool = False
    partial: int | None = None
    """The oldest version of its checkpoint."""
    segments: int = 0
    oldest: int = 0
    payload: str = ""
    """whole, corrupt or missing, once it came home."""
    step: int = 0
    """The last that claimed it."""
    used: list[int] = field(default_factory=list)
    """The learner steps that used it, and were not undone."""


def is_live(attempt: Attempt) -> bool:
    return attempt.state in LIVE


def is_segment(group: str) -> bool:
    return ":" in group


def index_of(group: str) -> int:
    return int(group.partition(":")[0])


class Model:
    """What the ledger must say; no Redis in it."""

    def __init__(self, rules: BufferSettings) -> None:
        self.rules = rules
        self.attempts: dict[str, Attempt] = {}
        self.groups: dict[str, list[str]] = {}
        self.replaced: Counter[str] = Counter()
        self.over: set[str] = set()  # groups of which a member is trained
        self.manifests: dict[int, list[str]] = {}
        self.durable: dict[int, list[str]] = {}  # manifests that are committed
        self.version = self.issued = self.trained = self.committed = self.created = 0
        self.before: dict[int, tuple[int, bool]] = {}  # version -> the one it came after, and whether it is the same
        self.outbox: list[list[tuple[str, str]]] = [[]]  # of each call
        self.aside: list[str] = []
        self.trials: dict[str, str] = {}  # worker -> the attempt on its last chance that it had last

    @property
    def room(self) -> int:
        held = [g for g in self.groups if not is_segment(g) and (alive := self.alive(g)) and not self.was_used(alive)]
        return (self.rules.eta + 1) * self.rules.batch_size - len(held)

    def was_used(self, members: Iterable[str]) -> bool:
        return any(step <= self.trained for name in members for step in self.attempts[name].used)

    def count(self, *states: str) -> int:
        return sum(attempt.state in states for attempt in self.attempts.values())

    def alive(self, group: str) -> list[str]:
        return [name for name in self.groups[group] if is_live(self.attempts[name])]

    def create(self, limit: int) -> int:
        count = max(0, min(limit, self.room))
        for index in range(self.created, self.created + count):
            for member in range(self.rules.group_size):
                self.add(f"{index}/{member}", f"{index}", f"source-{index % 2}")
        self.created += count
        return count

    def add(self, name: str, group: str, source: str) -> Attempt:
        self.groups.setdefault(group, []).append(name)
        self.attempts[name] = Attempt(group, source)
        return self.attempts[name]

    # From live to finished

    def finish(self, name: str, outcome: str) -> None:
        attempt = self.attempts[name]
        attempt.state, attempt.lease = outcome, None
        if outcome in ("dropped:poisoned", "dropped:rejected"):
            if attempt.payload in ("whole", "corrupt") or attempt.partial is not None:
                self.aside.append(name)
        elif self.rules.archive and attempt.payload == "whole":
            self.outbox[-1].append((name, outcome))

    def let_go(self, name: str, reason: str) -> bool:
        """Drop it, unless a learner step has used it; returns whether it was dropped."""
        attempt = self.attempts[name]
        if not attempt.used:
            self.finish(name, f"dropped:{reason}")
            return True
        if attempt.used[-1] > self.committed:
            attempt.state, attempt.step = "claimed", attempt.used[-1]
        else:
            self.train(name, attempt.used[-1])
        return False

    def train(self, name: str, step: int) -> None:
        self.finish(name, f"trained:{step}")
        self.over.add(self.attempts[name].group)

    def lose(self, name: str, reason: str) -> None:
        group = self.attempts[name].group
        if not self.let_go(name, reason):
            return
        replaces = self.rules.group_failures == "replace" and reason in ("env_failed", "poisoned", "rejected")
        if replaces and not is_segment(group) and self.replaced[group] < self.rules.group_size:
            self.replaced[group] += 1
            member, _, time = name.partition("/")[2].partition(".")
            self.add(f"{group}/{member}.{int(time or 0) + 1}", group, self.attempts[name].source)

    def settle(self, group: str) -> None:
        alive = self.alive(group)
        if any(self.attempts[name].state == "claimed" for name in alive):
            return
        if group in self.over or 2 * len(alive) <= (1 if is_segment(group) else self.rules.group_size):
            for name in alive:
                self.let_go(name, "filtered")
        else:
            self.evict(group)

    def drop(self, name: str, reason: str) -> None:
        self.lose(name, reason)
        self.settle(self.attempts[name].group)

    def requeue(self, name: str) -> None:
        attempt = self.attempts[name]
        attempt.state, attempt.lease, attempt.expired, attempt.payload = "queued", None, False, ""

    def crash(self, names: list[str]) -> None:
        for name in names:
            attempt = self.attempts[name]
            if attempt.state == "leased":  # else its group went with a sibling just now
                attempt.crashes += 1
                if attempt.crashes < self.rules.max_tries:
                    self.requeue(name)
                else:
                    self.drop(name, "poisoned")

    def lease(self, worker: str, n: int) -> list[str]:
        """Of the queued ones, but never two on their last chance for one worker at a time."""
        leased: list[str] = []
        queued = [(index_of(a.group), name) for name, a in self.attempts.items() if a.state == "queued"]
        for _, name in sorted(queued):
            attempt = self.attempts[name]
            if len(leased) == n:
                break
            if attempt.crashes >= max(1, self.rules.max_tries - 1):
                other = self.attempts.get(self.trials.get(worker, ""))
                if other and (other.state, other.worker) == ("leased", worker):
                    continue
                self.trials[worker] = name
            attempt.state, attempt.worker = "leased", worker
            if attempt.partial is not None and self.too_old(attempt.partial):
                attempt.partial = None
            leased.append(name)
        return leased

    # Learning

    def complete_groups(self) -> list[tuple[int, int, str]]:
        """Oldest version, index and name of those that can be claimed, oldest first."""
        return sorted(
            (min(self.attempts[name].oldest for name in alive), index_of(group), group)
            for group in self.groups
            if (alive := self.alive(group)) and all(self.attempts[name].state == "ready" for name in alive)
        )

    def evict(self, *groups: str) -> None:
        for oldest, _, group in self.complete_groups():
            if group in groups and self.too_old(oldest):
                for name in self.alive(group):
                    self.let_go(name, "stale")

    def claim(self, step: int) -> list[str] | None:
        if step not in self.manifests:
            ranked = [group for _, _, group in self.complete_groups()]
            groups = (ranked if self.rules.order == "oldest" else ranked[::-1])[: self.rules.batch_size]
            if len(groups) < self.rules.batch_size:
                return None
            self.manifests[step] = [name for group in self.in_order(groups) for name in self.padded(group)]
            for name in dict.fromkeys(self.manifests[step]):
                attempt = self.attempts[name]
                attempt.state, attempt.step = "claimed", step
                attempt.used.append(step)
        return self.manifests[step]

    def padded(self, group: str) -> list[str]:
        alive, size = self.alive(group), 1 if is_segment(group) else self.rules.group_size
        return [alive[i % len(alive)] for i in range(size)]

    def in_order(self, groups: list[str]) -> list[str]:
        """Of one episode, earlier segments first."""
        waiting: dict[int, list[tuple[float, str]]] = {}
        for _, index, group in self.complete_groups():
            if is_segment(group) or self.attempts[f"{group}/0"].segments:
                number = int(group.partition(":")[2]) if is_segment(group) else float("inf")
                waiting.setdefault(index, []).append((number, group))
        pieces = {index: iter(sorted(some)) for index, some in waiting.items()}
        return [next(pieces[index_of(group)])[1] if index_of(group) in pieces else group for group in groups]

    def too_old(self, sampled: int) -> bool:
        age, now = 0, self.version
        while sampled < now:
            before, same = self.before[now]
            age, now = age + (0 if same else now - before), before
        return age > self.rules.eta

    def publish(self, version: int, trained_step: int, before: int, same: bool = False) -> None:
        self.version, self.before[version] = version, (before, same)
        for step, names in self.manifests.items():
            if self.trained < step <= trained_step:
                for name in dict.fromkeys(names):
                    attempt = self.attempts[name]
                    if (attempt.state, attempt.step) == ("claimed", step) and len(attempt.used) < self.rules.max_uses:
                        attempt.state = "ready"
        self.trained = max(self.trained, trained_step)
        self.evict(*self.groups)

    def commit(self, step: int) -> None:
        self.committed = max(self.committed, step)
        for made in sorted(made for made in self.manifests if made <= step):
            names = self.durable[made] = self.manifests.pop(made)
            for name in dict.fromkeys(names):
                attempt = self.attempts[name]
                if (attempt.state, attempt.step) == ("claimed", made):
                    self.train(name, made)
            for group in dict.fromkeys(self.attempts[name].group for name in names):
                self.settle(group)

    def unclaim(self, step: int, crashed: bool = False) -> int:
        groups, back = [], 0
        for name in dict.fromkeys(self.manifests.pop(step)):
            attempt = self.attempts[name]
            if step in attempt.used:
                attempt.used.remove(step)
            if (attempt.state, attempt.step) != ("claimed", step):
                continue
            back += 1
            groups.append(attempt.group)
            attempt.crashes += crashed
            if attempt.crashes >= self.rules.max_tries:
                self.lose(name, "poisoned")
            elif attempt.payload != "missing":
                attempt.state = "ready"
            elif is_segment(attempt.group) or attempt.used:
                self.let_go(name, "lost")
            else:
                self.requeue(name)
        for group in dict.fromkeys(groups):
            self.settle(group)
        return back

    def withdraw(self, step: int, unreadable: Iterable[str]) -> None:
        self.unclaim(step)
        for name in unreadable:
            if self.attempts[name].state == "ready":
                self.drop(name, "rejected")

    def rewind(self, step: int, asked: bool) -> int:
        self.commit(step)
        self.committed = step
        steps = sorted(self.manifests, reverse=True)
        back = sum(self.unclaim(made, crashed=made > self.trained and not asked) for made in steps)
        self.trained = step
        return back


LEASE = st.integers(0, 100)  # picks one of the leases ever given, mostly one that is held
AGE = st.sampled_from([0, 0, 1, 0, 1, 2, 3])
WORKER = st.sampled_from(["worker-0", "worker-1"])


class LifeCycle(RuleBasedStateMachine):
    url: str
    bring: Callable[..., Trajectory]
    changes: dict[str, object]
    segmented: bool

    def __init__(self) -> None:
        super().__init__()
        run = f"model-{uuid.uuid4().hex[:8]}"
        rules = {"run": run, "url": self.url, "batch_size": 2, "eta": 1, "max_tries": 2} | self.changes
        self.rules = BufferSettings.model_validate(rules)
        self.buffer = ReplayBuffer(self.rules)
        self.client = redis.Redis.from_url(self.url)
        self.prefix = f"{{{run}}}:"
        self.model = Model(self.rules)
        self.leases: list[Lease] = []
        self.segments: list[tuple[Lease, int]] = []  # that came home
        self.step = 0  # the last one the learner claimed
        self.lineages = {0: Lineage()}  # by version
        self.archived = 0  # calls that are
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.buffer.forget()
        self.buffer.close()
        self.client.close()
        self.folder.cleanup()

    def _pick(self, number: int) -> tuple[Lease, Attempt, bool]:
        held = [lease for lease in self.leases if self._holds(lease)]
        some = held if held and number % 4 else self.leases
        lease = some[number // 4 % len(some)]
        return lease, self.model.attempts[lease.attempt], self._holds(lease)

    def _holds(self, lease: Lease) -> bool:
        attempt = self.model.attempts[lease.attempt]
        return attempt.state == "leased" and attempt.lease == lease

    def _version(self, age: int) -> int:
        return max(0, self.model.version - age)

    # Workers

    @precondition(lambda self: self.model.room > 0)
    @rule(limit=st.integers(1, 5))
    def put_tasks(self, limit: int) -> None:
        made = self.buffer.put_tasks(lambda i: Task(f"t/{i}", f"source-{i % 2}", i), limit)
        assert made == self.model.create(limit)

    @precondition(lambda self: self.model.count("queued", "leased"))
    @rule(worker=WORKER, n=st.integers(1, 4))
    def lease(self, worker: str, n: int) -> None:
        self._lease(worker, n)

    def _lease(self, worker: str, n: int) -> list[Lease]:
        leases = self.buffer.lease(worker, n)
        self.model.crash(sorted(name for name, a in self.model.attempts.items() if a.state == "leased" and a.expired))
        assert [lease.attempt for lease in leases] == self.model.lease(worker, n)
        for lease in leases:
            attempt = self.model.attempts[lease.attempt]
            attempt.lease = lease
            assert lease.tries == attempt.failures + attempt.crashes + 1
            assert lease.segments == attempt.segments
            assert (lease.partial is None) == (attempt.partial is None)
        self.leases += leases
        return leases

    @precondition(lambda self: self.model.room > 0 or self.model.count("queued", "leased"))
    @rule(worker=WORKER, n=st.integers(2, 4), age=AGE)
    def work(self, worker: str, n: int, age: int) -> None:
        self.put_tasks(5)
        for lease in self._lease(worker, 2 * n):
            if self._holds(lease):  # else its group went with a sibling just now
                self._complete(lease, age)

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, age=st.sampled_from([None, 0, 2, 3]))
    def heartbeat(self, pick: int, age: int | None) -> None:
        lease, attempt, held = self._pick(pick)
        oldest = {} if age is None else {lease.attempt: self._version(age)}
        cancelled = self.rules.too_old == "cancel" and any(map(self.model.too_old, oldest.values()))
        answer = self.buffer.heartbeat([lease], oldest)
        assert [beat.token for beat in answer] == [lease.token] * (held and not cancelled)
        attempt.expired = attempt.expired and not held
        if held and cancelled:
            self.model.drop(lease.attempt, "cancelled")

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, age=AGE)
    def checkpoint(self, pick: int, age: int) -> None:
        lease, attempt, held = self._pick(pick)
        assert self.buffer.checkpoint(lease, self.bring(lease, self._version(age))) == held
        if held:
            attempt.partial, attempt.expired = self._version(age), False

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def start_over(self, pick: int) -> None:
        lease, attempt, held = self._pick(pick)
        self.buffer.start_over(lease, "the sandbox differs")
        if held:
            attempt.partial = None

    @precondition(lambda self: self.segmented and self.leases)
    @rule(pick=LEASE, age=AGE)
    def segment(self, pick: int, age: int) -> None:
        lease, attempt, held = self._pick(pick)
        self._segment(lease, attempt.segments + 1, age)
        if held:
            self.segments.append((lease, attempt.segments))

    @precondition(lambda self: self.segments)
    @rule(pick=LEASE, age=AGE)
    def segment_once_more(self, pick: int, age: int) -> None:
        """As if the answer had been lost, and perhaps the lease since."""
        self._segment(*self.segments[pick % len(self.segments)], age)

    def _segment(self, lease: Lease, number: int, age: int) -> None:
        attempt, held = self.model.attempts[lease.attempt], self._holds(lease)
        name = lease.piece(number).attempt
        piece = self.model.attempts.get(name)
        counted = piece is not None and is_live(piece) and piece.lease == lease
        version = piece.oldest if piece and counted else self._version(age)  # the same once more
        cut = self.bring(lease.piece(number), version), self.bring(lease, version)
        answer = self.buffer.segment(lease, number, *cut)
        new = held and number > attempt.segments
        assert answer == ("ok" if new else "duplicate" if counted or held else "gone")
        if new:
            attempt.segments, attempt.partial, attempt.expired = number, version, False
            piece = self.model.add(name, name.partition("/")[0], attempt.source)
            piece.state, piece.oldest, piece.lease = "ready", version, lease
        if new or counted:
            assert piece is not None
            piece.payload = piece.payload if piece.payload == "corrupt" else "whole"
        if new:
            self.model.settle(name.partition("/")[0])

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, age=AGE)
    def complete(self, pick: int, age: int) -> None:
        self._complete(self._pick(pick)[0], age)

    def _complete(self, lease: Lease, age: int) -> None:
        attempt, held = self.model.attempts[lease.attempt], self._holds(lease)
        counted = attempt.lease == lease and not held
        version = attempt.oldest if counted else self._version(age)  # the same once more
        answer = self.buffer.complete(lease, self.bring(lease, version))
        assert answer == ("duplicate" if counted else "ok" if held else "gone")
        if held:
            attempt.state, attempt.oldest, attempt.partial, attempt.expired = "ready", version, None, False
            attempt.payload = "whole"
            self.model.settle(attempt.group)
        elif counted and attempt.payload == "missing":
            attempt.payload = "whole"

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def fail(self, pick: int) -> None:
        lease, attempt, held = self._pick(pick)
        last = attempt.failures + 1 >= self.rules.max_tries
        assert self.buffer.fail(lease, "broken") == (("dropped" if last else "requeued") if held else "gone")
        if held and last:
            self.model.drop(lease.attempt, "env_failed")
        elif held:
            attempt.failures += 1
            self.model.requeue(lease.attempt)

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def release(self, pick: int) -> None:
        lease, _, held = self._pick(pick)
        self.buffer.release(lease)
        if held:
            self.model.requeue(lease.attempt)

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def expire(self, pick: int) -> None:
        lease, attempt, _ = self._pick(pick)
        self.client.zadd(f"{self.prefix}leased", {lease.attempt: 1}, xx=True)
        attempt.expired = attempt.state == "leased"

    @precondition(lambda self: self.model.count("leased"))
    @rule(worker=WORKER)
    def a_worker_starts_again(self, worker: str) -> None:
        by_deadline = [name.decode() for name in self.client.zrange(f"{self.prefix}leased", 0, -1)]
        held = [name for name in by_deadline if self.model.attempts[name].worker == worker]
        taken = self.buffer.abandon(worker)
        self.model.crash(held)
        assert taken <= len(held)  # siblings may have gone together

    # The learner

    @precondition(lambda self: self.model.count("ready", "claimed"))
    @rule(retry=st.booleans())
    def claim(self, retry: bool) -> None:
        step = self.step if retry and self.step in self.model.manifests else self.step + 1
        claimed = self.buffer.claim(step)
        assert claimed == self.model.claim(step)
        if claimed is not None:
            self.step = step
            self._read_or_withdraw(step, claimed)

    def _read_or_withdraw(self, step: int, claimed: list[str]) -> None:
        payloads = {name: self.model.attempts[name].payload for name in claimed}
        unreadable = {name for name, payload in payloads.items() if payload != "whole"}
        try:
            oldest = [trajectory.oldest_version for trajectory in self.buffer.get(claimed)]
            assert not unreadable
            assert oldest == [self.model.attempts[name].oldest for name in claimed]
        except Unreadable as error:
            assert set(error.reasons) == unreadable
            assert {name for name, why in error.reasons.items() if why == "missing"} == {
                name for name in unreadable if payloads[name] == "missing"
            }
            if step > self.model.trained:  # what is trained was read before
                self.buffer.withdraw(step, error.reasons)
                self.model.withdraw(step, error.reasons)
                self.step = step - 1

    @precondition(lambda self: self.step)
    @rule(behind=st.integers(0, 1))
    def claim_what_is_durable(self, behind: int) -> None:
        step = self.model.committed - behind
        if step > 0:
            with pytest.raises(StepCommitted):
                self.buffer.claim(step)

    @precondition(lambda self: self.step > self.model.committed or self.model.version < 2)
    @rule()
    def publish(self) -> None:
        self._publish(self.model.version, same=False)

    def _publish(self, before: int, same: bool) -> None:
        version = self.buffer.next_version()
        assert version == max(self.model.issued, self.model.version) + 1
        self.model.issued = version
        lineage = self.lineages[before].repeat(version, before) if same else self.lineages[before]
        self.lineages[version] = lineage.within(self.rules.eta, version)
        self.buffer.publish(version, self.step, self.lineages[version])
        self.model.publish(version, self.step, before, same)

    @precondition(lambda self: self.model.manifests)
    @rule(behind=st.integers(0, 2))
    def commit(self, behind: int) -> None:
        step = max(self.model.committed, min(self.step, self.model.trained) - behind)
        self.buffer.commit(step)
        self.model.commit(step)

    @precondition(lambda self: self.model.manifests)
    @rule(behind=st.integers(0, 2), asked=st.booleans(), lost=st.integers(0, 3))
    def end_of_the_learner(self, behind: int, asked: bool, lost: int) -> None:
        """The next one goes on from the weights of so many versions before."""
        if asked:
            self.buffer.leave()
        step = max(self.model.committed, min(self.step, self.model.trained) - behind)  # its newest checkpoint
        known = {made: names for made, names in (self.model.durable | self.model.manifests).items() if made <= step}
        version = self.model.version
        for _ in range(lost):
            version = self.model.before[version][0] if version else 0
        if version < self.model.version:  # which is good for nothing any more
            self.model.before[self.model.version] = version, True
        back = self.buffer.rewind(step, known, version, self.lineages[version])
        assert back == self.model.rewind(step, asked)
        self.step = step
        self._publish(version, same=True)

    @precondition(lambda self: self.model.manifests)
    @rule()
    def redis_came_back(self) -> None:
        """It has forgotten nothing, and nothing changes."""
        lineage = self.lineages[self.model.version]
        self.buffer.reconcile(self.model.manifests, self.model.durable, self.model.version, lineage)
        self.model.issued = max(self.model.issued, self.model.version)

    @precondition(lambda self: self.model.count("ready"))
    @rule(steps=st.integers(1, 2))
    def learn(self, steps: int) -> None:
        for _ in range(steps):
            self.claim(retry=False)
            if self.step > self.model.trained:
                self.publish()

    # Accidents and their traces

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, damage=st.sampled_from(["missing", "corrupt"]))
    def damage(self, pick: int, damage: str) -> None:
        names = [name for name, a in self.model.attempts.items() if is_live(a) and a.payload == "whole"]
        if not names:
            return
        name = names[pick % len(names)]
        payload = self.client.hget(f"{self.prefix}attempt:{name}", "payload")
        assert payload is not None
        if damage == "missing":
            self.client.delete(payload)
        else:
            self.client.set(payload, b"ARGO, or so it seems", xx=True, keepttl=True)
        self.model.attempts[name].payload = damage

    @precondition(lambda self: any(self.model.outbox[self.archived :]))
    @rule()
    def archive(self) -> None:
        folder = Path(self.folder.name)
        self.buffer.archive(folder)
        assert self.buffer.stats()["to_archive"] == 0
        archived = [(a.trajectory.attempt, a.outcome) for a in read_archive(folder)] if any(folder.iterdir()) else []
        for batch in self.model.outbox:  # what one call finished may come in any order
            assert sorted(archived[: len(batch)]) == sorted(batch)
            archived = archived[len(batch) :]
        assert not archived
        self.archived = len(self.model.outbox)

    @invariant()
    def both_agree(self) -> None:
        model = self.model
        model.outbox.append([])
        states = {name: attempt.state for name, attempt in model.attempts.items()}
        found = books.read(self.client, self.rules.run)
        assert found.states == states
        assert not found.complaints
        ledger = self.buffer.ledger()
        assert ledger.balanced
        for source in ("source-0", "source-1"):
            mine = Counter(a.state.split(":")[0] for a in model.attempts.values() if a.source == source)
            row = ledger.by_source.get(source)
            assert mine.total() == (row.created if row else 0)
            if row:
                there = Counter(row.live) + Counter(trained=row.trained, dropped=sum(row.dropped.values()))
                assert there == mine
        for name, attempt in list(model.attempts.items())[-3:]:
            assert self.buffer.state(name) == attempt.state
        assert ledger.dropped == Counter(s.split(":")[1] for s in states.values() if s.startswith("dropped"))
        assert self.buffer.stats()["room"] == model.room
        assert self.buffer.stats()["aside"] == model.aside[::-1]


@pytest.mark.timeout(900 + 4 * EXAMPLES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_life_cycle_equals_its_model(configuration: str, redis_url: str, bring: Callable[..., Trajectory]) -> None:
    what = {"changes": CONFIGURATIONS[configuration], "segmented": configuration == "segments"}
    machine = type("Machine", (LifeCycle,), {"url": redis_url, "bring": staticmethod(bring)} | what)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        ),
    )
