"""The life cycle against a model of it in plain Python: any sequence of calls leaves both in the same state."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import redis
from argosy.buffer import BufferSettings, Lease, ReplayBuffer, Task, Trajectory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

ETA, BATCH, SIZE, TRIES = 1, 2, 2, 2


@dataclass
class Attempt:
    group: int
    state: str = "queued"
    tries: int = 0
    lease: Lease | None = None
    expired: bool = False
    oldest: int = 0
    partial: int | None = None


@dataclass
class Model:
    """What the ledger must say; no Redis in it."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)
    manifests: dict[int, list[str]] = field(default_factory=dict)
    version: int = 0
    issued: int = 0
    committed: int = 0

    @property
    def room(self) -> int:
        return (ETA + 1) * BATCH - len(self.active)

    def create(self, limit: int) -> int:
        first, count = len(self.attempts) // SIZE, max(0, min(limit, self.room))
        for group in range(first, first + count):
            self.active.add(group)
            self.attempts |= {f"{group}/{i}": Attempt(group) for i in range(SIZE)}
        return count

    def alive(self, group: int) -> dict[str, Attempt]:
        return {f"{group}/{i}": a for i in range(SIZE) if is_live((a := self.attempts[f"{group}/{i}"]).state)}

    def complete_groups(self) -> list[tuple[int, int]]:
        """(oldest version, group) of those that can be claimed, in the order of claiming."""
        alive = {a.group: self.alive(a.group) for a in self.attempts.values() if is_live(a.state)}
        return sorted(
            (min(a.oldest for a in members.values()), group)
            for group, members in alive.items()
            if all(a.state == "ready" for a in members.values())
        )

    def finish(self, attempt: Attempt, outcome: str) -> None:
        attempt.state, attempt.lease = outcome, None
        if not self.alive(attempt.group):
            self.active.discard(attempt.group)

    def drop(self, attempt: Attempt, reason: str) -> None:
        self.finish(attempt, f"dropped:{reason}")
        rest = self.alive(attempt.group)
        if 2 * len(rest) <= SIZE:
            for sibling in rest.values():
                self.finish(sibling, "dropped:filtered")

    def requeue(self, attempt: Attempt) -> None:
        attempt.state, attempt.lease, attempt.expired = "queued", None, False

    def take_back_expired(self) -> None:
        for _, attempt in sorted(self.attempts.items()):
            if attempt.state == "leased" and attempt.expired:
                if attempt.tries >= TRIES:
                    self.drop(attempt, "poisoned")
                else:
                    self.requeue(attempt)

    def evict(self) -> None:
        for oldest, group in self.complete_groups():
            if oldest < self.version - ETA:
                for attempt in self.alive(group).values():
                    self.finish(attempt, "dropped:stale")

    def claim(self, step: int) -> list[str] | None:
        if step not in self.manifests:
            self.evict()
            groups = self.complete_groups()[:BATCH]
            if len(groups) < BATCH:
                return None
            self.manifests[step] = [name for _, group in groups for name in self.alive(group)]
            for name in self.manifests[step]:
                self.attempts[name].state = "claimed"
        return self.manifests[step]

    def publish(self, version: int, trained_step: int) -> None:
        self.version = max(self.version, version)
        for step, names in self.manifests.items():
            if step <= trained_step:
                self.active -= {self.attempts[name].group for name in names}
        self.evict()

    def commit(self, step: int) -> None:
        for made in [made for made in self.manifests if made <= step]:
            for name in self.manifests.pop(made):
                self.finish(self.attempts[name], f"trained:{made}")
        self.committed = max(self.committed, step)

    def rewind(self, step: int) -> int:
        self.commit(step)
        names = [name for names in self.manifests.values() for name in names]
        for name in names:
            self.attempts[name].state = "ready"
            self.active.add(self.attempts[name].group)
        self.manifests = {}
        self.committed = step
        return len(names)


def is_live(state: str) -> bool:
    return ":" not in state


LEASE = st.integers(0, 30)  # picks one of the leases ever given, dead ones included


class LifeCycle(RuleBasedStateMachine):
    url: str
    bring: Callable[..., Trajectory]

    def __init__(self) -> None:
        super().__init__()
        run = f"model-{uuid.uuid4().hex[:8]}"
        rules = {"batch_size": BATCH, "group_size": SIZE, "eta": ETA, "max_tries": TRIES}
        self.buffer = ReplayBuffer(BufferSettings.model_validate({"run": run, "url": self.url} | rules))
        self.client = redis.Redis.from_url(self.url)
        self.leased = f"{{{run}}}:leased"
        self.model = Model()
        self.leases: list[Lease] = []
        self.step = 0  # the last one the learner claimed

    def teardown(self) -> None:
        self.buffer.close()
        self.client.close()

    def _pick(self, number: int) -> tuple[Lease, Attempt, bool]:
        lease = self.leases[number % len(self.leases)]
        attempt = self.model.attempts[lease.attempt]
        return lease, attempt, attempt.state == "leased" and attempt.lease == lease

    @rule(limit=st.integers(1, 5))
    def put_tasks(self, limit: int) -> None:
        made = self.buffer.put_tasks(lambda i: Task(f"t/{i}", f"source-{i % 2}", i), limit)
        assert made == self.model.create(limit)

    @rule(n=st.integers(1, 4))
    def lease(self, n: int) -> None:
        leases = self.buffer.lease("worker", n)
        self.model.take_back_expired()
        queued = [(a.group, name) for name, a in self.model.attempts.items() if a.state == "queued"]
        assert [lease.attempt for lease in leases] == [name for _, name in sorted(queued)[:n]]
        for lease in leases:
            attempt = self.model.attempts[lease.attempt]
            attempt.state, attempt.lease, attempt.tries = "leased", lease, attempt.tries + 1
            if attempt.partial is not None and attempt.partial < self.model.version - ETA:
                attempt.partial = None
            assert lease.tries == attempt.tries
            assert (lease.partial is None) == (attempt.partial is None)
        self.leases += leases

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def heartbeat(self, pick: int) -> None:
        lease, attempt, held = self._pick(pick)
        assert [beat.token for beat in self.buffer.heartbeat([lease])] == [lease.token] * held
        attempt.expired = attempt.expired and not held

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, age=st.integers(0, 3))
    def checkpoint(self, pick: int, age: int) -> None:
        lease, attempt, held = self._pick(pick)
        version = max(0, self.model.version - age)
        assert self.buffer.checkpoint(lease, self.bring(lease, version)) == held
        if held:
            attempt.partial, attempt.expired = version, False

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE, age=st.integers(0, 3))
    def complete(self, pick: int, age: int) -> None:
        lease, attempt, held = self._pick(pick)
        version = max(0, self.model.version - age)
        counted = attempt.lease == lease and not held
        answer = self.buffer.complete(lease, self.bring(lease, version))
        assert answer == ("duplicate" if counted else "ok" if held else "gone")
        if answer == "ok":
            attempt.state, attempt.oldest, attempt.partial, attempt.expired = "ready", version, None, False

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def fail(self, pick: int) -> None:
        lease, attempt, held = self._pick(pick)
        last = attempt.tries >= TRIES
        assert self.buffer.fail(lease, "broken") == (("dropped" if last else "requeued") if held else "gone")
        if held and last:
            self.model.drop(attempt, "env_failed")
        elif held:
            self.model.requeue(attempt)

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def release(self, pick: int) -> None:
        lease, attempt, held = self._pick(pick)
        self.buffer.release(lease)
        if held:
            attempt.tries -= 1
            self.model.requeue(attempt)

    @precondition(lambda self: self.leases)
    @rule(pick=LEASE)
    def expire(self, pick: int) -> None:
        lease, attempt, _ = self._pick(pick)
        self.client.zadd(self.leased, {lease.attempt: 1}, xx=True)
        attempt.expired = attempt.state == "leased"

    @rule(retry=st.booleans())
    def claim(self, retry: bool) -> None:
        step = self.step if retry and self.step in self.model.manifests else self.step + 1
        claimed = self.buffer.claim(step)
        assert claimed == self.model.claim(step)
        if claimed is not None:
            self.step = step
            oldest = [trajectory.oldest_version or 0 for trajectory in self.buffer.get(claimed)]
            assert oldest == [self.model.attempts[name].oldest for name in claimed]

    @precondition(lambda self: self.step > self.model.committed)
    @rule()
    def publish(self) -> None:
        version = self.buffer.next_version()
        assert version == max(self.model.issued, self.model.version) + 1
        self.model.issued = version
        self.buffer.publish(version, self.step)
        self.model.publish(version, self.step)

    @rule(behind=st.integers(0, 2))
    def commit(self, behind: int) -> None:
        step = max(self.model.committed, self.step - behind)
        self.buffer.commit(step)
        self.model.commit(step)

    @rule(behind=st.integers(0, 2))
    def crash_of_the_learner(self, behind: int) -> None:
        step = max(self.model.committed, self.step - behind)  # its newest checkpoint, committed or not
        held = [name for made, names in self.model.manifests.items() if made <= step for name in names]
        assert self.buffer.rewind(step, held) == self.model.rewind(step)
        self.step = step

    @invariant()
    def both_agree(self) -> None:
        ledger = self.buffer.ledger()
        states = [attempt.state for attempt in self.model.attempts.values()]
        assert ledger.balanced
        assert ledger.created == len(states)
        assert ledger.trained == sum(state.startswith("trained") for state in states)
        assert ledger.live == {s: states.count(s) for s in ("queued", "leased", "ready", "claimed")}
        for name, attempt in self.model.attempts.items():
            assert self.buffer.state(name) == attempt.state, name
        assert self.buffer.stats()["room"] == self.model.room


@pytest.mark.timeout(180)
def test_the_life_cycle_equals_its_model(redis_url: str, bring: Callable[..., Trajectory]) -> None:
    machine = type("Machine", (LifeCycle,), {"url": redis_url, "bring": staticmethod(bring)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
