"""Redis away, loading, full or restarted delays a call; it never loses one."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from argosy.buffer import BufferSettings, RedisUnavailable, ReplayBuffer, Task, Trajectory

if TYPE_CHECKING:
    from conftest import RedisServer

TaskOf = Callable[[int], Task]
Bring = Callable[..., Trajectory]


def settings(server: "RedisServer", **changes: object) -> BufferSettings:
    return BufferSettings.model_validate({"run": "r", "url": server.url, "batch_size": 1, "eta": 1} | changes)


def test_a_deadline_names_the_server_and_what_to_check(redis_server: "RedisServer") -> None:
    buffer = ReplayBuffer(settings(redis_server, patience_seconds=0.3))
    assert buffer.version() == 0
    redis_server.kill()
    with pytest.raises(
        RedisUnavailable, match=r"version: Redis at unix://.*redis.sock does not answer for 0.3 s.*Check"
    ):
        buffer.version()


def test_a_restart_is_survived_with_leases_and_payloads(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server))
    buffer.put_tasks(task, 2)
    first, second = buffer.lease("actor-0", 2)
    buffer.complete(first, bring(first))
    redis_server.kill()
    timer = threading.Timer(0.5, redis_server.start)
    timer.start()
    with caplog.at_level(logging.WARNING):
        assert buffer.complete(second, bring(second)) == "ok"
    timer.join()
    assert "complete waits: Redis at unix://" in caplog.text
    assert buffer.claim(1) == ["0/0"]
    assert buffer.get(["0/0", "1/0"]) == [bring(first), bring(second)]


def test_leases_outlive_an_outage_but_not_their_dead_workers(redis_server: "RedisServer", task: TaskOf) -> None:
    rules = settings(redis_server, lease_seconds=2)
    buffer = ReplayBuffer(rules)
    buffer.put_tasks(task, 2)
    alive, dead = buffer.lease("actor-0", 2)
    redis_server.kill()
    time.sleep(2.1)
    redis_server.start()
    other = ReplayBuffer(rules)
    other.version()
    assert other.lease("actor-1", 2) == []
    assert [lease.attempt for lease in buffer.heartbeat([alive])] == [alive.attempt]
    time.sleep(1.2)
    assert [lease.attempt for lease in other.lease("actor-1", 2)] == [dead.attempt]


def test_the_learner_reconciles_before_anything_else_reaches_a_restarted_redis(
    redis_server: "RedisServer", task: TaskOf, bring: Bring
) -> None:
    calls = []

    def reconcile() -> None:
        calls.append(buffer.version())
        buffer.reconcile({1: ["0/0"]}, {}, version=3)

    buffer = ReplayBuffer(settings(redis_server), on_restart=reconcile)
    buffer.put_tasks(task, 1)
    buffer.lease("actor-0", 1)
    for restarts in (1, 2):
        redis_server.kill()
        redis_server.start()
        assert buffer.version() == 3
        assert len(calls) == restarts
    assert buffer.state("0/0") == "claimed"


def test_half_a_transition_never_comes_back(redis_server: "RedisServer", task: TaskOf) -> None:
    """Redis forgets a transition that a power cut tore, and without a rewrite it applies half of it a restart later."""
    buffer = ReplayBuffer(settings(redis_server, batch_size=8))
    buffer.put_tasks(task, 8)
    redis_server.kill()
    redis_server.lose_tail(30)
    redis_server.start(repair=False)
    assert buffer.ledger().created == 0
    buffer.rewind(0, {})
    deadline = time.monotonic() + 20
    while redis_server.client().info("persistence")["aof_rewrite_in_progress"]:
        assert time.monotonic() < deadline, "the rewrite does not end"
        time.sleep(0.01)
    assert buffer.put_tasks(task, 3) == 3
    redis_server.kill()
    redis_server.start(repair=False)
    ledger = buffer.ledger()
    assert (ledger.created, ledger.live["queued"], ledger.balanced) == (3, 3, True)


def test_a_full_redis_holds_workers_back_and_lets_the_learner_make_room(
    redis_server: "RedisServer", task: TaskOf, bring: Bring, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(settings(redis_server, batch_size=4, eta=9))
    buffer.put_tasks(task, 40)
    leases = buffer.lease("actor-0", 40)
    client = redis_server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
    answers: list[str] = []

    def work() -> None:
        for lease in leases:
            answers.append(buffer.complete(lease, bring(lease, length=10_000)))  # 82 kB

    with caplog.at_level(logging.WARNING):
        worker = threading.Thread(target=work)
        worker.start()
        deadline = time.monotonic() + 20
        while "is full (maxmemory)" not in caplog.text:
            assert time.monotonic() < deadline, "Redis never got full"
            time.sleep(0.02)
    assert worker.is_alive() and 4 <= len(answers) < 40
    assert len(buffer.heartbeat(leases)) == 40 - len(answers)
    for step in range(1, 11):
        while buffer.claim(step) is None:
            assert time.monotonic() < deadline, f"step {step} never came"
            buffer.wait(0.1)
        buffer.publish(step if step < 9 else 9, trained_step=step)
        buffer.commit(step)
    worker.join(20)
    assert answers == ["ok"] * 40
    ledger = buffer.ledger()
    assert (ledger.trained, ledger.balanced) == (40, True)
