"""Each arrow of an attempt's life, and each promise of the buffer, on a real Redis."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from argosy.buffer import (
    Balance,
    BufferSettings,
    Candidate,
    Lease,
    Lineage,
    RedisUnavailable,
    ReplayBuffer,
    Task,
    Trajectory,
    Unreadable,
    read_archive,
    unpack,
)
from argosy.buffer.errors import LearnerReplaced, StepCommitted

from .conftest import RedisServer

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
    nothing_live = dict.fromkeys(("queued", "leased", "ready", "claimed"), 0)
    assert ledger.by_source["count"] == Balance(created=1, trained=1, dropped={}, live=nothing_live)
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
    buffer.rewind(0, {})
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
        assert buffer.heartbeat([kept]) == [kept]
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
    assert heir.partial == bring(lease, 0, length=9)
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


def test_failing_and_crashing_are_counted_apart(
    make_buffer: MakeBuffer, task: TaskOf, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(max_tries=2)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.fail(lease, "sandbox_gone")
    (lease,) = buffer.lease("actor-0", 1)
    expire(redis_url, run_name, lease)
    (lease,) = buffer.lease("actor-0", 1)
    assert lease.tries == 3
    assert buffer.fail(lease, "sandbox_gone") == "dropped"


def test_what_a_dead_worker_held_is_taken_back_by_its_name(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer()
    buffer.put_tasks(task, 3)
    old = buffer.lease("actor-0", 2)
    (other,) = buffer.lease("actor-1", 1)
    assert buffer.abandon("actor-0") == 2
    assert [lease.attempt for lease in buffer.heartbeat([*old, other])] == [other.attempt]
    assert [(lease.attempt, lease.tries) for lease in buffer.lease("actor-0", 9)] == [("0/0", 2), ("1/0", 2)]


def test_an_attempt_that_kills_the_learner_is_poisoned_and_kept_aside(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring
) -> None:
    buffer = make_buffer(batch_size=1, eta=3, max_tries=2)
    buffer.put_tasks(task, 2)
    leases = buffer.lease("actor-0", 2)
    for lease in leases:
        buffer.complete(lease, bring(lease, 0))
    buffer.claim(1)
    buffer.publish(buffer.next_version(), trained_step=1)
    for _ in range(2):  # step 1 is only forgotten; it is over step 2 that the learner dies
        assert buffer.claim(2) == ["1/0"]
        buffer.rewind(0, {})
        assert buffer.claim(1) == ["0/0"]
        buffer.publish(buffer.next_version(), trained_step=1)
    assert buffer.claim(2) is None
    assert [buffer.state("0/0"), buffer.state("1/0")] == ["claimed", "dropped:poisoned"]
    blob = buffer.aside("1/0")
    assert blob is not None and unpack(blob) == bring(leases[1], 0)
    assert (buffer.aside("0/0"), buffer.stats()["aside"]) == (None, ["1/0"])
    assert buffer.ledger().balanced


def test_a_learner_that_was_asked_to_stop_blames_nobody(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, max_tries=1)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.complete(lease, bring(lease))
    buffer.claim(1)
    buffer.leave()
    assert buffer.rewind(0, {}) == 1
    assert buffer.claim(1) == ["0/0"]
    buffer.rewind(0, {})
    assert buffer.state("0/0") == "dropped:poisoned"


def test_a_learner_that_was_replaced_is_told(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    old, new = make_buffer(batch_size=1), make_buffer(batch_size=1)
    old.rewind(0, {})
    old.put_tasks(task, 2)
    for lease in old.lease("actor-0", 2):
        old.complete(lease, bring(lease))
    assert old.claim(1) == ["0/0"]
    new.rewind(0, {})
    for call in (
        lambda: old.claim(1),
        lambda: old.publish(1, 1),
        lambda: old.commit(1),
        lambda: old.withdraw(1, {}),
        lambda: old.reconcile({1: ["0/0"]}, {}, 1),
    ):
        with pytest.raises(LearnerReplaced, match="only one may train it"):
            call()
    assert new.claim(1) == ["0/0"]


def test_an_attempt_on_its_last_chance_takes_no_others_with_it(
    make_buffer: MakeBuffer, task: TaskOf, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(batch_size=4, max_tries=3)
    buffer.put_tasks(task, 4)
    for _ in range(2):
        assert len(buffer.lease("actor-0", 4)) == 4
        buffer.abandon("actor-0")
    assert len(buffer.lease("actor-0", 4)) == 1
    assert buffer.lease("actor-0", 4) == []
    (second,) = buffer.lease("actor-1", 4)
    buffer.abandon("actor-0")
    buffer.release(second)
    assert [buffer.state(f"{i}/0") for i in range(4)] == ["dropped:poisoned", "queued", "queued", "queued"]
    assert len(buffer.lease("actor-0", 4)) == 1


def test_a_lease_asked_for_again_is_the_same(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer()
    buffer.put_tasks(task, 4)
    first = buffer.lease("actor-0", 2, "token")
    assert buffer.lease("actor-0", 2, "token") == first
    assert [lease.attempt for lease in buffer.lease("actor-0", 2)] == ["2/0", "3/0"]


def test_a_checkpoint_that_did_not_arrive_leaves_the_one_before(
    redis_server: RedisServer, task: TaskOf, bring: Bring, make_settings: Callable[..., BufferSettings]
) -> None:
    buffer = ReplayBuffer(make_settings(url=redis_server.url, patience_seconds=0.3))
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    assert buffer.checkpoint(lease, bring(lease, 0, length=6))
    client = redis_server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1)
    with pytest.raises(RedisUnavailable, match="is full"):
        buffer.checkpoint(lease, bring(lease, 0, length=100_000))
    client.config_set("maxmemory", 0)
    buffer.release(lease)
    (heir,) = buffer.lease("actor-0", 1)
    assert heir.partial == bring(lease, 0, length=6)


def test_a_step_larger_than_what_lua_passes_at_once(make_buffer: MakeBuffer, task: TaskOf) -> None:
    buffer = make_buffer(batch_size=512, group_size=16)
    ids = [f"{group}/{member}" for group in range(512) for member in range(16)]
    buffer.put_tasks(task, 512)
    buffer.reconcile({1: ids}, {}, 1)
    assert buffer.ledger().live["claimed"] == 8192
    buffer.commit(1)
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.balanced) == (8192, True)


def test_an_id_that_is_none_is_no_attempt(make_buffer: MakeBuffer) -> None:
    assert [make_buffer().state(name) for name in ("17", "x/0", "17/", "17/0/0", "")] == [None] * 5


def test_what_cannot_be_read_is_withdrawn_and_the_step_made_anew(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer(batch_size=3, eta=1)
    buffer.put_tasks(task, 6)
    leases = buffer.lease("actor-0", 6)
    for lease in leases[:4]:
        buffer.complete(lease, bring(lease, 0))
    ids = buffer.claim(1)
    assert ids == ["0/0", "1/0", "2/0"]
    client = redis.Redis.from_url(redis_url)
    (corrupt,), (lost,) = keys(redis_url, run_name, "payload:0/0:*"), keys(redis_url, run_name, "payload:1/0:*")
    client.setrange(corrupt, 100, b"garbage")
    client.delete(lost)
    with pytest.raises(Unreadable) as raised:
        buffer.get(ids)
    assert {attempt: reason.partition(":")[0] for attempt, reason in raised.value.reasons.items()} == {
        "0/0": "CorruptBlob",
        "1/0": "missing",
    }
    buffer.withdraw(1, raised.value.reasons)
    assert [buffer.state(f"{i}/0") for i in range(4)] == ["dropped:rejected", "queued", "ready", "ready"]
    assert buffer.stats()["aside"] == ["0/0"]
    assert buffer.claim(1) is None
    (again,) = buffer.lease("actor-1", 1)
    assert (again.attempt, again.tries) == ("1/0", 1)  # it was not to blame
    buffer.complete(again, bring(again, 0))
    assert buffer.claim(1) == ["1/0", "2/0", "3/0"]
    assert len(buffer.get(["1/0", "2/0", "3/0"])) == 3
    ledger = buffer.ledger()
    assert (ledger.dropped, ledger.balanced) == ({"rejected": 1}, True)


def test_a_corrupt_partial_starts_over(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str
) -> None:
    buffer = make_buffer()
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.checkpoint(lease, bring(lease, 0))
    buffer.release(lease)
    (name,) = keys(redis_url, run_name, "partial:*")
    redis.Redis.from_url(redis_url).setrange(name, 100, b"garbage")
    (heir,) = buffer.lease("actor-1", 1)
    assert heir.partial is None
    story = buffer.story("0/0")
    assert story is not None and "starts over" in story.events[-1].what
    assert keys(redis_url, run_name, "partial:*") == []


def test_what_runs_beyond_the_bound_is_cancelled_where_asked(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring
) -> None:
    for too_old, held in (("finish", 2), ("cancel", 1)):
        buffer = make_buffer(run=f"run-{too_old}", batch_size=1, eta=1, too_old=too_old)
        buffer.put_tasks(task, 2)
        leases = buffer.lease("actor-0", 2)
        buffer.publish(2, trained_step=0)
        assert len(buffer.heartbeat(leases, {"0/0": 0, "1/0": 1})) == held
    assert buffer.state("0/0") == "dropped:cancelled"
    assert buffer.complete(leases[0], bring(leases[0], 0)) == "gone"
    assert buffer.put_tasks(task, 9) == 1
    buffer.forget()


def test_a_group_that_lost_members_is_padded_or_dropped(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, group_size=3, max_tries=1)
    buffer.put_tasks(task, 2)
    leases = buffer.lease("actor-0", 6)
    buffer.complete(leases[0], bring(leases[0]))
    buffer.complete(leases[1], bring(leases[1]))
    assert buffer.claim(1) is None
    buffer.fail(leases[2], "sandbox_gone")
    assert buffer.claim(1) == ["0/0", "0/1", "0/0"]  # padded
    assert [trajectory.attempt for trajectory in buffer.get(["0/0", "0/1", "0/0"])] == ["0/0", "0/1", "0/0"]
    buffer.fail(leases[3], "sandbox_gone")
    buffer.fail(leases[4], "sandbox_gone")
    assert [buffer.state(f"1/{i}") for i in range(3)] == ["dropped:env_failed"] * 2 + ["dropped:filtered"]
    assert buffer.complete(leases[5], bring(leases[5])) == "gone"
    buffer.publish(1, trained_step=1)
    buffer.commit(1)
    assert (buffer.ledger().trained, buffer.ledger().balanced) == (2, True)


def test_a_group_that_lost_members_gets_others(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, group_size=2, max_tries=1, group_failures="replace")
    buffer.put_tasks(task, 1)
    kept, failed = buffer.lease("actor-0", 2)
    buffer.complete(kept, bring(kept))
    assert buffer.fail(failed, "sandbox_gone") == "dropped"
    (other,) = buffer.lease("actor-0", 2)
    assert (other.attempt, other.task, other.group_index) == ("0/1.1", failed.task, 1)
    buffer.complete(other, bring(other))
    assert buffer.claim(1) == ["0/0", "0/1.1"]
    buffer.commit(1)
    ledger = buffer.ledger()
    assert (ledger.created, ledger.trained, ledger.dropped, ledger.balanced) == (3, 2, {"env_failed": 1}, True)
    # a task whose environment never works does not go on for ever
    buffer.publish(1, trained_step=1)
    buffer.put_tasks(task, 1)
    failed = [lease.attempt for _ in range(9) for lease in buffer.lease("actor-0", 1) if buffer.fail(lease, "gone")]
    assert failed == ["1/0", "1/0.1", "1/0.2"]
    ledger = buffer.ledger()
    assert (ledger.dropped, sum(ledger.live.values())) == ({"env_failed": 4, "filtered": 1}, 0)


def test_segments_come_home_before_their_episode_and_are_claimed_in_order(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring
) -> None:
    buffer = make_buffer(batch_size=1, eta=9, order="freshest")
    buffer.put_tasks(task, 2)
    lease, other = buffer.lease("actor-0", 2)

    def bring_segment(lease: Lease, number: int, version: int) -> str:
        piece, so_far = bring(lease.piece(number), version), bring(lease, version)
        return buffer.segment(lease, number, replace(piece, status="segment"), replace(so_far, status="segment"))

    assert bring_segment(lease, 1, 0) == "ok"
    assert bring_segment(lease, 1, 0) == "duplicate"
    buffer.publish(1, trained_step=0)
    assert bring_segment(lease, 2, 1) == "ok"
    assert [buffer.state(f"0:{i}/0") for i in (1, 2, 3)] == ["ready", "ready", None]
    buffer.release(lease)
    (heir,) = buffer.lease("actor-1", 1)
    assert (heir.segments, heir.partial) == (2, replace(bring(lease, 1), status="segment"))
    assert bring_segment(lease, 3, 1) == "gone"
    buffer.publish(2, trained_step=0)
    assert bring_segment(heir, 3, 2) == "ok"
    assert buffer.complete(heir, bring(heir, 2)) == "ok"
    buffer.complete(other, bring(other, 1))
    claimed = [buffer.claim(step) for step in range(1, 6)]
    assert claimed == [["0:1/0"], ["0:2/0"], ["0:3/0"], ["0/0"], ["1/0"]]  # freshest first, and yet in order
    assert buffer.get(["0:2/0"])[0].status == "segment"
    buffer.publish(3, trained_step=5)
    buffer.commit(5)
    ledger = buffer.ledger()
    assert (ledger.created, ledger.trained, ledger.balanced) == (5, 5, True)


def test_an_order_of_claims(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    for order, expected in (("oldest", "0/0"), ("freshest", "2/0"), (f"{__name__}:only_the_second", "1/0")):
        buffer = make_buffer(run=f"order-{expected[0]}", batch_size=1, eta=9, order=order)
        buffer.put_tasks(task, 3)
        for version, lease in enumerate(buffer.lease("actor-0", 3)):
            buffer.publish(version, trained_step=0)
            buffer.complete(lease, bring(lease, version))
        assert buffer.claim(1) == [expected]
        assert buffer.claim(1) == [expected]
    assert buffer.claim(2) is None  # the others weigh nothing
    buffer.forget()


def only_the_second(candidate: Candidate) -> float:
    assert (candidate.reward, candidate.tokens, candidate.uses) == (1.0, 12, 0)
    return 1.0 if candidate.oldest_version == 1 else 0.0


def test_a_trajectory_may_be_trained_on_more_than_once(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=2, max_uses=2)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.complete(lease, bring(lease, 0))
    assert buffer.claim(1) == ["0/0"]
    assert buffer.claim(2) is None
    buffer.publish(1, trained_step=1)
    assert buffer.claim(2) == ["0/0"]
    buffer.rewind(0, {})  # neither use is durable
    assert buffer.state("0/0") == "ready"
    assert [buffer.claim(1), buffer.claim(2)] == [["0/0"], None]
    buffer.publish(2, trained_step=1)
    buffer.commit(1)
    assert buffer.state("0/0") == "ready"  # once more
    assert buffer.claim(2) == ["0/0"]
    buffer.publish(3, trained_step=2)
    assert buffer.claim(3) is None
    buffer.commit(2)
    assert buffer.state("0/0") == "trained:2"
    assert buffer.ledger().trained == 1

    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.complete(lease, bring(lease, 3))
    buffer.claim(3)
    buffer.publish(4, trained_step=3)
    buffer.publish(6, trained_step=3)  # too old for another use: what it was trained on counts
    assert buffer.state("1/0") == "claimed"
    buffer.commit(3)
    assert buffer.state("1/0") == "trained:3"
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.dropped, ledger.balanced) == (2, {}, True)


def test_what_is_trained_or_dropped_is_archived_once(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring, redis_url: str, run_name: str, tmp_path: Path
) -> None:
    buffer = make_buffer(batch_size=1, eta=1, archive=True)
    buffer.put_tasks(task, 2)
    first, second = buffer.lease("actor-0", 2)
    buffer.complete(first, bring(first, 0))
    buffer.claim(1)
    buffer.publish(2, trained_step=1)
    buffer.complete(second, bring(second, 0))
    buffer.claim(2)  # drops what is stale
    assert buffer.archive(tmp_path) == 1
    assert buffer.archive(tmp_path) == 0
    buffer.commit(1)
    assert buffer.archive(tmp_path) == 1
    found = [(one.trajectory, one.outcome) for one in read_archive(tmp_path)]
    assert found == [(bring(second, 0), "dropped:stale"), (bring(first, 0), "trained:1")]
    assert keys(redis_url, run_name, "payload:*") == []


def test_the_whole_story_of_an_attempt(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(lambda i: Task("an id of its own", "count", 7), 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.fail(lease, "sandbox_gone")
    (lease,) = buffer.lease("actor-1", 1)
    buffer.release(lease)
    (lease,) = buffer.lease("actor-1", 1)
    live = buffer.story("0/0")
    assert live is not None and (live.state, live.facts["worker"]) == ("leased", "actor-1")
    buffer.publish(5, trained_step=0)
    buffer.complete(lease, bring(lease, 3))
    buffer.claim(1)
    buffer.rewind(0, {})
    buffer.claim(1)
    buffer.publish(6, trained_step=1)
    buffer.commit(1)
    story = buffer.story("0/0")
    assert story is not None
    assert (story.task, story.state) == (Task("an id of its own", "count", 7), "trained:1")
    assert [event.what for event in story.events] == [
        "created",
        "leased by actor-0",
        "the environment failed",
        "leased by actor-1",
        "handed back",
        "leased by actor-1",
        "came home, sampled by version 3",
        "claimed for step 1 at version 5",
        "ready again: the learner lost the step",
        "claimed for step 1 at version 5",
        "trained",
    ]
    assert abs(story.events[-1].time - time.time()) < 60
    assert buffer.story("8/0") is None
    staleness = buffer.stats()["staleness_trained"]
    assert [staleness[which] for which in ("flight", "queue", "total")] == [{2: 1}, {0: 1}, {2: 1}]


def test_rewind_returns_what_no_checkpoint_holds(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(task, 4)
    for lease in buffer.lease("actor-0", 4):
        buffer.complete(lease, bring(lease, 0))
    for step in (1, 2, 3):
        buffer.claim(step)
        buffer.publish(buffer.next_version(), trained_step=step)
    # checkpoint 1 became durable, its commit never arrived, the learner died in step 3
    assert buffer.rewind(1, {1: ["0/0"]}) == 2
    assert [buffer.state(f"{i}/0") for i in range(4)] == ["trained:1", "ready", "ready", "ready"]
    assert buffer.next_version() == 4  # never reused
    buffer.publish(3, trained_step=1)
    assert buffer.put_tasks(task, 9) == 1  # the places are held again
    assert buffer.claim(2) == ["1/0"]
    assert buffer.rewind(1, {1: ["0/0"]}) == 1
    assert buffer.rewind(1, {1: ["0/0"]}) == 0
    assert buffer.ledger().balanced


def test_rewind_believes_the_checkpoint_about_what_was_trained(
    make_buffer: MakeBuffer, task: TaskOf, bring: Bring
) -> None:
    """Redis forgot a claim, and even a creation, that a durable checkpoint holds."""
    buffer = make_buffer(batch_size=1, eta=3)
    buffer.put_tasks(task, 1)
    (lease,) = buffer.lease("actor-0", 1)
    buffer.rewind(1, {1: ["0/0", "1/0"]})
    assert buffer.complete(lease, bring(lease)) == "gone"
    assert buffer.put_tasks(task, 2) == 2
    assert [buffer.state(f"{i}/0") for i in range(3)] == ["trained:1", "trained:1", "queued"]
    ledger = buffer.ledger()
    assert (ledger.created, ledger.trained, ledger.balanced) == (3, 2, True)


def test_reconcile_makes_the_learner_right(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    buffer = make_buffer(batch_size=1, eta=7)
    buffer.put_tasks(task, 4)
    leases = buffer.lease("actor-0", 4)
    for lease in leases[:3]:
        buffer.complete(lease, bring(lease, 0))
    buffer.claim(2)  # Redis thinks 0/0; the learner trained 1/0, 3/0 (still leased here) and 4/0 (unknown here)
    buffer.reconcile({2: ["1/0"], 3: ["3/0"], 4: ["4/0"]}, {}, version=7)
    states = {i: buffer.state(f"{i}/0") for i in range(5)}
    assert states == {0: "ready", 1: "claimed", 2: "ready", 3: "claimed", 4: None}
    assert buffer.complete(leases[3], bring(leases[3], 0)) == "gone"
    assert buffer.put_tasks(task, 1) == 1
    assert buffer.state("4/0") == "claimed"  # not run again while its gradient lives
    assert (buffer.version(), buffer.next_version()) == (7, 8)
    assert buffer.claim(2) == ["1/0"]
    with pytest.raises(Unreadable, match="3/0"):
        buffer.get(["1/0", "3/0"])
    buffer.commit(3)
    assert [buffer.state(f"{i}/0") for i in (1, 3, 4)] == ["trained:2", "trained:3", "claimed"]
    assert buffer.rewind(3, {}) == 1
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
    size = sum(client.memory_usage(name) or 0 for name in history) / 640
    print(f"{size:.1f} bytes an attempt")
    assert size < 60
    assert len(keys(redis_url, run_name)) - len(history) < 20


def test_a_crash_of_the_learner_makes_nothing_older(make_buffer: MakeBuffer, task: TaskOf, bring: Bring) -> None:
    """The versions that are lost with it do not count, neither for what it had claimed nor for what is reported."""
    buffer = make_buffer(batch_size=1, eta=2)
    buffer.put_tasks(task, 2)
    first, late = buffer.lease("actor-0", 2)
    buffer.publish(10, 0)
    buffer.complete(first, bring(first, 8))
    buffer.claim(1)
    for version in (11, 12, 13):
        buffer.publish(version, 0)
    buffer.rewind(0, {}, version=10)
    lineage = Lineage().repeat(14, 10)
    buffer.publish(14, 0, lineage)
    assert buffer.stats()["staleness"] == {2: 1}
    assert buffer.claim(1) == ["0/0"]
    buffer.commit(1)
    assert buffer.stats()["staleness_trained"]["total"] == {2: 1}
    buffer.complete(late, bring(late, 12))  # by a version that is lost
    buffer.publish(16, 1, lineage)
    assert buffer.stats()["staleness"] == {2: 1}
    buffer.publish(17, 1, lineage.within(2, 17))
    assert buffer.state("1/0") == "dropped:stale"
