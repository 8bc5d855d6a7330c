"""Each arrow of an attempt's life, and each promise of the buffer, on a real Redis."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis
from argosy.buffer import Lease, ReplayBuffer, Task, Trajectory, unpack
from argosy.buffer.errors import PayloadLost, StepCommitted

MakeBuffer = Callable[..., ReplayBuffer]
TaskOf = Callable[[int], Task]
Bring = Callable[..., Trajectory]


def expire(redis_url: str, run: str, *leases: Lease) -> None:
    """Let the deadlines pass without waiting for them."""
    client = redis.Redis.from_url(redis_url)
    client.zadd(f"{{{run}}}:leased", {lease.attempt: 1 for lease in leases}, xx=True)


def keys(redis_url: str, run: str, pattern: str = "*") -> list[bytes]:
    return sorted(redis.Redis.from_url(redis_url).scan_iter(f"{{{run}}}:{pattern}"))


def test_from_task_to_trained(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer()
    assert buffer.put_tasks(task, 3) == 3
    first, second = buffer.lease("actor-0", 2)
    assert (first.attempt, first.task, first.tries, first.partial) == ("0/0", task(0), 1, None)
    assert buffer.claim(1) is None
    sent = [bring(first, 0), bring(second, 0)]
    assert [buffer.complete(lease, t) for lease, t in zip((first, second), sent)] == ["ok", "ok"]
    assert buffer.state("0/0") == "ready"
    ids = buffer.claim(1)
    assert ids == ["0/0", "1/0"]
    assert buffer.claim(1) == ids  # every rank and every retry
    assert buffer.get(ids) == sent
    buffer.publish(buffer.next_version(), trained_step=1)
    assert (buffer.version(), buffer.state("0/0")) == (1, "claimed")
    buffer.commit(1)
    assert [buffer.state(i) for i in ("0/0", "1/0", "2/0", "9/0")] == ["trained:1", "trained:1", "queued", None]
    ledger = buffer.ledger()
    assert (ledger.created, ledger.trained, ledger.live["queued"], ledger.lost) == (3, 2, 1, 0)
    assert ledger.by_source["count"] == {"created": 1, "trained": 1, "dropped": 0, "live": 0}
    assert ledger.balanced
    assert keys(redis_url, run_name, "payload:*") == []
    with pytest.raises(StepCommitted, match="second learner"):
        buffer.claim(1)


def test_admission_never_exceeds_the_staleness_bound(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=2, eta=1)
    assert buffer.put_tasks(task, 100) == 4  # (eta + 1) * batch_size
    assert buffer.put_tasks(task, 100) == 0
    for lease in buffer.lease("actor-0", 4):
        buffer.complete(lease, bring(lease))
    buffer.claim(1)
    assert buffer.put_tasks(task, 100) == 0  # a claimed group still holds its place...
    buffer.publish(buffer.next_version(), trained_step=1)
    assert buffer.put_tasks(task, 100) == 2  # ...until its step is trained


def test_many_workers_create_each_task_once(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer(batch_size=50, eta=3)
    asked: list[int] = []

    def source(index: int) -> Task:
        asked.append(index)
        return task(index)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: buffer.put_tasks(source, 40), range(8)))
    assert sum(made) == 200
    leases = buffer.lease("actor-0", 300)
    assert [lease.task for lease in leases] == [task(i) for i in range(200)]
    assert set(asked) == set(range(200))


def test_eta_zero_is_synchronous(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=2, eta=0)
    for step in range(1, 4):
        assert buffer.put_tasks(task, 10) == 2
        for lease in buffer.lease("actor-0", 10):
            buffer.complete(lease, bring(lease, step - 1))
        assert len(buffer.claim(step) or []) == 2
        buffer.publish(step, trained_step=step)
    assert buffer.ledger().dropped == {}


def test_too_old_is_dropped_and_counted_never_claimed(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=1)
    buffer.put_tasks(task, 2)
    old, new = buffer.lease("actor-0", 2)
    buffer.publish(2, trained_step=0)
    assert buffer.complete(old, bring(old, 0)) == "ok"
    assert buffer.complete(new, bring(new, 1)) == "ok"
    assert buffer.claim(1) == [new.attempt]
    assert buffer.state(old.attempt) == "dropped:stale"
    buffer.rewind(0, [])
    buffer.publish(3, trained_step=0)  # eviction does not wait for a claim
    assert buffer.state(new.attempt) == "dropped:stale"
    assert buffer.ledger().dropped == {"stale": 2}
    assert buffer.put_tasks(task, 9) == 2  # and makes room


def test_the_oldest_token_of_the_group_counts(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=1, group_size=2)
    buffer.put_tasks(task, 2)
    leases = buffer.lease("actor-0", 4)
    buffer.publish(3, trained_step=0)
    for lease, version in zip(leases, (3, 2, 2, 1)):
        buffer.complete(lease, bring(lease, version))
    assert buffer.claim(1) == ["0/0", "0/1"]
    assert [buffer.state(f"1/{i}") for i in (0, 1)] == ["dropped:stale"] * 2


def test_older_versions_are_claimed_first(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(task, 3)
    buffer.publish(2, trained_step=0)
    for lease, version in zip(buffer.lease("actor-0", 3), (2, 1, 2)):
        buffer.complete(lease, bring(lease, version))
    assert [buffer.claim(step) for step in (1, 2, 3)] == [["1/0"], ["0/0"], ["2/0"]]


def test_a_lost_lease_cannot_write(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(batch_size=1)
    buffer.put_tasks(task, 1)
    (zombie,) = buffer.lease("actor-0", 1)
    expire(redis_url, run_name, zombie)
    (heir,) = buffer.lease("actor-1", 1)
    assert (heir.attempt, heir.tries) == (zombie.attempt, 2)
    assert heir.token != zombie.token
    assert buffer.heartbeat([zombie, heir])[0].token == heir.token
    assert not buffer.checkpoint(zombie, bring(zombie, 0))
    assert buffer.complete(zombie, bring(zombie, 0)) == "gone"
    assert buffer.fail(zombie, "late") == "gone"
    buffer.release(zombie)
    assert buffer.complete(heir, bring(heir, 0)) == "ok"
    assert buffer.complete(zombie, bring(zombie, 0)) == "gone"  # nor over the finished one
    ids = buffer.claim(1)
    assert ids is not None and buffer.get(ids)[0].id == "0/0@2"
    assert buffer.stats()["late_results"] == 2
    assert len(keys(redis_url, run_name, "payload:*")) == 1


def test_complete_again_is_a_duplicate_and_its_payload_stays(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(batch_size=1)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    assert [buffer.complete(lease, bring(lease)) for _ in range(3)] == ["ok", "duplicate", "duplicate"]
    (payload,) = keys(redis_url, run_name, "payload:*")
    assert redis.Redis.from_url(redis_url).ttl(payload) == -1
    assert buffer.ledger().live["ready"] == 1


def test_heartbeat_extends_a_lease(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer(lease_seconds=1.5)
    buffer.put_tasks(task, 2)
    kept, lost = buffer.lease("actor-0", 2)
    for _ in range(4):
        time.sleep(0.4)
        (beat,) = buffer.heartbeat([kept])
        assert beat.deadline > kept.deadline
    assert [lease.attempt for lease in buffer.lease("actor-1", 2)] == [lost.attempt]
    assert buffer.heartbeat([lost]) == []


def test_the_next_try_resumes_from_the_last_checkpoint(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(batch_size=1, eta=1)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    assert buffer.checkpoint(lease, bring(lease, 0, length=6))
    assert buffer.checkpoint(lease, bring(lease, 0, length=9))
    buffer.release(lease)
    (heir,) = buffer.lease("actor-1", 1)
    assert heir.tries == 1  # leaving is not failing
    assert heir.partial is not None and unpack(heir.partial).n_tokens == 9
    buffer.publish(2, trained_step=0)
    buffer.release(heir)
    (late,) = buffer.lease("actor-2", 1)
    assert late.partial is None  # it has tokens that could never be claimed: start over
    assert keys(redis_url, run_name, "partial:*") == []


def test_failures_are_tried_again_then_dropped(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer(max_tries=2)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    assert buffer.fail(lease, "sandbox_gone", "bwrap was killed") == "requeued"
    (lease,) = buffer.lease("actor-0", 1)
    assert buffer.fail(lease, "sandbox_gone") == "dropped"
    assert buffer.state("0/0") == "dropped:env_failed"
    failures = buffer.stats()["failures"]
    assert [(f["tries"], f["detail"]) for f in failures] == [(2, ""), (1, "bwrap was killed")]


def test_an_attempt_that_kills_its_workers_is_poisoned(
    make_buffer: MakeBuffer, task: TaskOf, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(max_tries=3)
    buffer.put_tasks(task, 1)
    for tries in (1, 2, 3):
        (lease,) = buffer.lease("actor-0", 1)
        assert lease.tries == tries
        expire(redis_url, run_name, lease)
    assert buffer.lease("actor-0", 1) == []
    assert buffer.state("0/0") == "dropped:poisoned"
    assert buffer.ledger().balanced


def test_a_group_survives_a_minority_of_failures(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, group_size=3, max_tries=1)
    buffer.put_tasks(task, 2)
    leases = buffer.lease("actor-0", 6)
    buffer.complete(leases[0], bring(leases[0]))
    buffer.complete(leases[1], bring(leases[1]))
    assert buffer.claim(1) is None
    buffer.fail(leases[2], "sandbox_gone")
    assert buffer.claim(1) == ["0/0", "0/1"]
    buffer.fail(leases[3], "sandbox_gone")
    buffer.fail(leases[4], "sandbox_gone")
    assert [buffer.state(f"1/{i}") for i in range(3)] == ["dropped:env_failed"] * 2 + ["dropped:filtered"]
    assert buffer.complete(leases[5], bring(leases[5])) == "gone"
    assert buffer.ledger().balanced


def test_rewind_returns_what_no_checkpoint_holds(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(task, 4)
    for lease in buffer.lease("actor-0", 4):
        buffer.complete(lease, bring(lease, 0))
    for step in (1, 2, 3):
        buffer.claim(step)
        buffer.publish(buffer.next_version(), trained_step=step)
    # checkpoint 1 became durable, its commit never arrived, the learner died in step 3
    assert buffer.rewind(1, ["0/0"]) == 2
    assert [buffer.state(f"{i}/0") for i in range(4)] == ["trained:1", "ready", "ready", "ready"]
    assert buffer.next_version() == 4  # never reused
    buffer.publish(3, trained_step=1)
    assert buffer.put_tasks(task, 9) == 1  # the places are held again
    assert buffer.claim(2) == ["1/0"]
    assert buffer.rewind(1, ["0/0"]) == 1
    assert buffer.rewind(1, ["0/0"]) == 0
    assert buffer.ledger().balanced


def test_rewind_believes_the_checkpoint_about_what_was_trained(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring
) -> None:
    """Redis forgot a claim, and even a creation, that a durable checkpoint holds."""
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.rewind(1, ["0/0", "1/0"])
    assert buffer.complete(lease, bring(lease)) == "gone"
    assert buffer.put_tasks(task, 2) == 2
    assert [buffer.state(f"{i}/0") for i in range(3)] == ["trained", "trained", "queued"]
    ledger = buffer.ledger()
    assert (ledger.created, ledger.trained, ledger.balanced) == (3, 2, True)


def test_reconcile_makes_the_learner_right(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=5)
    buffer.put_tasks(task, 4)
    leases = buffer.lease("actor-0", 4)
    for lease in leases[:3]:
        buffer.complete(lease, bring(lease, 0))
    buffer.claim(2)  # Redis thinks 0/0; the learner trained 1/0, 3/0 (still leased here) and 4/0 (unknown here)
    buffer.reconcile({2: ["1/0"], 3: ["3/0"], 4: ["4/0"]}, [], version=7)
    states = {i: buffer.state(f"{i}/0") for i in range(5)}
    assert states == {0: "ready", 1: "claimed", 2: "ready", 3: "claimed", 4: None}
    assert buffer.complete(leases[3], bring(leases[3], 0)) == "gone"
    assert buffer.put_tasks(task, 1) == 1
    assert buffer.state("4/0") == "claimed"  # not run again while its gradient lives
    assert (buffer.version(), buffer.next_version()) == (7, 8)
    assert buffer.claim(2) == ["1/0"]
    with pytest.raises(PayloadLost, match="3/0"):
        buffer.get(["1/0", "3/0"])
    buffer.commit(3)
    assert [buffer.state(f"{i}/0") for i in (1, 3, 4)] == ["trained:2", "trained:3", "claimed"]
    assert buffer.rewind(3, []) == 1
    assert buffer.state("4/0") == "queued"  # its gradient is lost and its payload unknown: run it
    assert buffer.ledger().balanced


def test_a_large_commit_goes_in_slices(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=50, eta=1, group_size=3)
    buffer.put_tasks(task, 100)
    for lease in buffer.lease("actor-0", 300):
        buffer.complete(lease, bring(lease, 0))
    ids = buffer.claim(1)
    assert ids is not None and len(ids) == 150
    assert len(buffer.get(ids)) == 150
    buffer.publish(1, trained_step=1)
    buffer.commit(1)
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.live["ready"], ledger.balanced) == (150, 150, True)


def test_versions_are_never_reused(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    assert [buffer.next_version(), buffer.next_version(), buffer.next_version(at_least=10)] == [1, 2, 11]
    buffer.publish(20, trained_step=0)
    assert buffer.next_version() == 21


def test_wait_wakes_for_a_batch_and_for_work(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer, learner = make_buffer(batch_size=1), make_buffer(batch_size=1)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    learner.wait(0.05)  # hears of the task
    started = time.monotonic()
    learner.wait(0.2)
    assert 0.15 < time.monotonic() - started < 2
    for event in (lambda: buffer.complete(lease, bring(lease)), lambda: buffer.publish(1, trained_step=0)):
        timer = threading.Timer(0.1, event)
        timer.start()
        started = time.monotonic()
        learner.wait(20)
        assert time.monotonic() - started < 5
        timer.join()


def test_two_runs_share_one_redis(make_buffer: MakeBuffer, task: TaskOf, run_name: str) -> None:
    one, other = make_buffer(run=f"{run_name}-a"), make_buffer(run=f"{run_name}-b")
    one.put_tasks(task, 2)
    assert other.lease("actor-0", 5) == []
    assert other.ledger().created == 0


def test_a_trajectory_of_another_attempt_is_refused(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer()
    buffer.put_tasks(task, 2)
    one, other = buffer.lease("actor-0", 2)
    with pytest.raises(ValueError, match="the lease says"):
        buffer.complete(one, bring(other))
    with pytest.raises(ValueError, match="the lease says"):
        buffer.checkpoint(one, replace(bring(one), group_size=2))


def test_history_is_compact(make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str) -> None:
    buffer = make_buffer(batch_size=64, eta=0)
    for step in range(1, 11):
        buffer.put_tasks(task, 64)
        for lease in buffer.lease("actor-0", 64):
            buffer.complete(lease, bring(lease, step - 1))
        buffer.claim(step)
        buffer.publish(step, trained_step=step)
        buffer.commit(step)
    client = redis.Redis.from_url(redis_url)
    history = keys(redis_url, run_name, "history:*")
    assert sum(client.memory_usage(name) or 0 for name in history) / 640 < 48  # bytes an attempt
    assert len(keys(redis_url, run_name)) - len(history) < 20
