"""Whose a run's keys are, in a Redis that several runs share."""

from collections.abc import Callable

import pytest
import redis
from argosy.buffer import BufferError, BufferSettings, ReplayBuffer, Task
from argosy.buffer.errors import RedisRefused, UnsafeRedis

from .conftest import RedisServer


def test_a_run_is_claimed_again_by_itself_and_by_nobody_else(make_buffer: Callable[..., ReplayBuffer]) -> None:
    make_buffer().claim_run("mine")
    make_buffer().claim_run("mine")
    with pytest.raises(BufferError, match=r"Redis at unix://.* already holds another run 'test-.*--fresh"):
        make_buffer().claim_run("yours")


def test_a_redis_that_could_lose_work_is_refused_or_said(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ReplayBuffer(BufferSettings(run="a", batch_size=1, url=redis_server.url))
    redis_server.client().config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsafeRedis, match=r"evicts keys when it is full .allkeys-lru.: set maxmemory-policy"):
        buffer.claim_run("mine")
    redis_server.client().config_set("maxmemory-policy", "noeviction")
    redis_server.client().config_set("appendonly", "no")
    buffer.claim_run("mine")
    assert "has no append-only file" in caplog.text


def test_a_forgotten_run_leaves_nothing_and_its_neighbour_whole(
    make_buffer: Callable[..., ReplayBuffer], task: Callable[[int], Task], redis_url: str, run_name: str
) -> None:
    buffer, neighbour = make_buffer(batch_size=2000, lease_seconds=60), make_buffer(run=f"{run_name}-neighbour")
    for each in (buffer, neighbour):
        each.claim_run("mine")
        each.put_tasks(task, 1500)
        each.lease("worker", 2)
    before = neighbour.ledger()
    buffer.forget()
    assert list(redis.Redis.from_url(redis_url).scan_iter(f"{{{run_name}}}:*")) == []
    assert buffer.ledger().created == 0
    assert neighbour.ledger() == before
    buffer.claim_run("yours")


def test_a_wrong_password_is_said_at_once(redis_server: RedisServer) -> None:
    redis_server.client().config_set("requirepass", "right")

    def ledger(password: str) -> object:
        url = redis_server.url.replace("unix://", f"unix://{password}")
        return ReplayBuffer(BufferSettings(run="a", batch_size=1, url=url)).ledger()

    assert ledger(":right@")
    for password in ("", ":wrong@"):
        with pytest.raises(RedisRefused, match="check the user and password") as caught:
            ledger(password)
        assert ":wrong@" not in str(caught.value)
