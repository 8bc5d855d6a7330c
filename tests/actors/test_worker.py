"""Whole episodes on the real engine, and what happens to them when something dies."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from argosy.actors.errors import TooManyFailures
from argosy.actors.settings import ActorConfig, Mixture
from argosy.actors.worker import Worker
from argosy.buffer import RedisUnavailable, ReplayBuffer, WeightLedger
from conftest import changed, last_line, ledger_of, ready, run_worker, wait_until


class OwnRedis:
    """A Redis that a test may kill or fill."""

    def __init__(self, folder: Path) -> None:
        self._url = f"unix://{folder}/r.sock"
        self._command = ["redis-server", "--port", "0", "--unixsocket", str(folder / "r.sock"), "--dir", str(folder)]
        self._command += ["--appendonly", "yes", "--save", ""]
        self.start()

    def start(self) -> None:
        self._server = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()

    def limit(self, memory: int) -> None:
        redis.Redis.from_url(self._url).config_set("maxmemory", memory)

    def serve(self, config: ActorConfig, **buffer: object) -> ActorConfig:
        """The same run in this Redis, which the session's engine serves as well."""
        record = WeightLedger(config.buffer).engines()["shared"]
        settings = config.buffer.model_copy(update={"url": self._url, **buffer})
        WeightLedger(settings).register_engine("shared", record.url, ttl=1000)
        return config.model_copy(update={"buffer": settings})


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path)
    yield server
    server.kill()


def test_episodes_land_in_the_buffer(config):
    worker = run_worker(config, 4)
    ledger = ledger_of(config)
    assert ledger.balanced
    assert ledger.live.get("leased", 0) == 0  # all was handed in or given back
    assert ledger.live["ready"] == worker.counters.episodes > 0
    trajectories = ready(config)
    assert len(trajectories) == worker.counters.episodes
    for trajectory in trajectories:
        assert trajectory.status in ("terminated", "truncated")
        assert (trajectory.engine, trajectory.actor) == ("shared", config.name)
        assert trajectory.sampling == {"temperature": 1.0}
        assert {turn.role for turn in trajectory.traces[0].turns} >= {"system", "user", "assistant"}
        assert trajectory.n_sampled > 0 and trajectory.timing["total"] > 0
    line = last_line(config, config.name)
    assert line["episodes"] == worker.counters.episodes and line["engine_tokens"] > line["sampled_tokens"] > 0


def test_work_stops_at_the_admission_bound_and_goes_on_after_it(config):
    """(eta + 1) * batch_size groups are in flight at most; the loop idles until there is room again."""
    small = config.model_copy(update={"buffer": config.buffer.model_copy(update={"batch_size": 2, "eta": 1})})
    assert run_worker(small, 2.5).counters.episodes == 4
    buffer = ReplayBuffer(small.buffer)
    assert buffer.claim(1)
    buffer.publish(buffer.next_version(), trained_step=1)
    assert run_worker(small, 1.5).counters.episodes == 2


@pytest.mark.parametrize(("kind", "reason"), [("infrastructure", "InfrastructureError"), ("bug", "KeyError")])
def test_a_failing_environment_is_no_reward(config, kind, reason):
    broken = changed(config, env="arena:Broken", kwargs={"kind": kind})
    worker = run_worker(broken, 3)
    ledger = ledger_of(broken)
    assert worker.counters.episodes == 0 and worker.counters.failed > 3
    assert ledger.balanced and "ready" not in {state for state, n in ledger.live.items() if n}
    assert ledger.dropped.get("env_failed", 0) > 0  # after three tries


def test_an_environment_that_does_not_stop_changes_nothing_about_its_attempt(config):
    clinging = changed(config, env="arena:Clinging")
    worker = run_worker(clinging, 2)
    assert worker.counters.episodes > 0 and worker.counters.failed == 0
    assert ledger_of(clinging).live["ready"] == worker.counters.episodes
    slow = changed(config, env="arena:Clinging", kwargs={"pause": 600.0}, drain_seconds=0.2)
    worker = run_worker(slow, 1)
    assert worker.counters.released > 0 and worker.counters.failed == 0
    assert {lease.tries for lease in ReplayBuffer(slow.buffer).lease("other", 4)} == {1}


def test_a_worker_stops_when_nothing_but_failures_comes(config, monkeypatch):
    monkeypatch.setattr("argosy.actors.worker.FAILURES_IN_A_ROW", 6)
    with pytest.raises(TooManyFailures):
        run_worker(changed(config, env="arena:Broken", kwargs={"kind": "bug"}), 30)
    assert ledger_of(config).balanced


def test_an_environment_that_does_not_exist_is_named_before_anything_is_leased(config, start):
    worker = start("worker", changed(config, env="arena:Gess"))
    assert worker.wait(30) == 1
    assert "'arena' has no 'Gess'; its environments are Guess" in str(worker)
    assert ledger_of(config).created == 0


def test_an_episode_over_its_deadline_is_truncated_and_graded(config):
    run_worker(changed(config, env="arena:Hanging", episode_seconds=1.0), 2.2)
    trajectories = ready(config)
    assert trajectories
    for trajectory in trajectories:
        assert trajectory.status == "truncated" and trajectory.reward == 0.0
        assert trajectory.n_sampled > 0


@pytest.mark.timeout(60)
def test_a_worker_that_lost_its_leases_drops_the_episodes(config, start):
    """It stands still until another has taken its attempts over; when it wakes up nothing is counted twice."""
    slow = changed(config, kwargs={"pause": 3.0}, drain_seconds=1)
    worker = start("worker", slow)
    wait_until(lambda: ledger_of(slow).live.get("leased", 0) == 4, 30, worker)
    worker.popen.send_signal(signal.SIGSTOP)
    other, taken = ReplayBuffer(slow.buffer), []
    wait_until(lambda: taken.extend(other.lease("other", 4 - len(taken))) or len(taken) == 4, 20, ledger_of(slow))
    worker.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: last_line(slow, slow.name)["late"] == 4, 10, worker)
    assert len(other.heartbeat(taken)) == 4  # the sleeper touched none of them
    assert ledger_of(slow).balanced


@pytest.mark.timeout(60)
def test_sigterm_drains(config, start):
    slow = changed(config, kwargs={"pause": 0.2}, drain_seconds=3)
    worker = start("worker", slow)
    wait_until(lambda: ledger_of(slow).live.get("ready", 0) >= 4, 30, worker)
    worker.popen.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert worker.wait(10) == 0, str(worker)
    assert time.monotonic() - started < 5
    ledger = ledger_of(slow)
    assert ledger.balanced and ledger.live.get("leased", 0) == 0


@pytest.mark.timeout(60)
def test_sigterm_gives_back_what_cannot_be_finished(config, start):
    slow = changed(config, kwargs={"pause": 600.0}, drain_seconds=0.5)
    worker = start("worker", slow)
    wait_until(lambda: ledger_of(slow).live.get("leased", 0) == 4, 30, worker)
    time.sleep(1)
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(8) == 0, str(worker)
    ledger = ledger_of(slow)
    assert ledger.balanced and ledger.live["queued"] == ledger.created


@pytest.mark.timeout(90)
def test_a_killed_workers_attempts_are_finished_by_another(config, start):
    slow = changed(config, kwargs={"pause": 600.0})
    killed = start("worker", slow)
    wait_until(lambda: ledger_of(slow).live.get("leased", 0) == 4, 30, killed)
    killed.popen.send_signal(signal.SIGKILL)
    killed.wait(5)
    before = ledger_of(slow)
    assert before.balanced and before.live["leased"] == 4
    other = start("worker", config.model_copy(update={"name": "actor-1"}))
    wait_until(lambda: ledger_of(config).live.get("ready", 0) == 40, 40, other)  # all that may be in flight
    other.popen.send_signal(signal.SIGTERM)
    assert other.wait(10) == 0, str(other)
    ledger = ledger_of(config)
    assert ledger.balanced and ledger.created == 40 and not ledger.dropped
    assert {trajectory.task.seed for trajectory in ready(config)} == set(range(40))


@pytest.mark.timeout(90)
def test_a_redis_restart_loses_nothing(config, own_redis):
    """Redis is killed and started again while episodes run and end; each finished one arrives."""
    # a busy machine is no reason to lose a lease here
    mine = own_redis.serve(changed(config, kwargs={"pause": 0.1}), batch_size=50, lease_seconds=30)

    async def run() -> Worker:
        worker = Worker(mine)
        running = asyncio.create_task(worker.run())
        while worker.counters.episodes < 8:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(own_redis.kill)
        await asyncio.sleep(2.5)  # every running episode ends meanwhile and has nowhere to go
        at_restart = worker.counters.episodes
        own_redis.start()
        while worker.counters.episodes < at_restart + 8:
            await asyncio.sleep(0.05)
        worker.stop()
        await running
        return worker

    worker = asyncio.run(run())
    ledger = ledger_of(mine)
    assert ledger.balanced and not ledger.dropped
    assert worker.counters.late == worker.counters.failed == 0
    assert ledger.live["ready"] == worker.counters.episodes


@pytest.mark.parametrize("step", ["lease", "put_tasks"])
def test_a_call_that_is_repeated_leaves_no_lease_behind(config, monkeypatch, step):
    """It took effect and its answer got lost; what had been leased is worked on all the same."""
    small = {"batch_size": 2, "eta": 1, "lease_seconds": 600}  # nothing comes back by itself
    small = config.model_copy(update={"buffer": config.buffer.model_copy(update=small)})
    assert ReplayBuffer(small.buffer).put_tasks(Mixture(small.sources), 2) == 2
    call, lost = getattr(ReplayBuffer, step), []

    def once_without_answer(*args):
        answer = call(*args)
        if not lost:
            lost.append(answer)
            raise RedisUnavailable("the answer got lost")
        return answer

    monkeypatch.setattr(ReplayBuffer, step, once_without_answer)
    worker = run_worker(small, 3)
    assert lost and worker.counters.episodes == 4
    assert ledger_of(small).live["ready"] == ledger_of(small).created == 4


@pytest.mark.timeout(90)
def test_heartbeats_go_on_while_every_episode_waits_for_a_full_redis(config, own_redis, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # of which asyncio makes five threads
    hanging = changed(config, env="arena:Hanging", episode_seconds=5.0, concurrency=24)
    mine = own_redis.serve(hanging, batch_size=24, eta=0, lease_seconds=5)
    other = ReplayBuffer(mine.buffer)

    async def run() -> Worker:
        worker = Worker(mine)
        running = asyncio.create_task(worker.run())
        while other.ledger().live.get("leased", 0) < 24:
            await asyncio.sleep(0.05)
        own_redis.limit(1)
        await asyncio.sleep(5 + 2 * 5)  # all end together, and then two lease times pass
        assert worker.counters.episodes == 0
        own_redis.limit(0)
        assert not other.lease("other", 24)  # which would take back what has expired
        while worker.counters.episodes < 24:
            await asyncio.sleep(0.05)
        worker.stop()
        await running
        return worker

    worker = asyncio.run(run())
    assert worker.counters.late == worker.counters.failed == 0
    assert ledger_of(mine).live["ready"] == 24


@pytest.mark.timeout(60)
def test_sigterm_ends_a_worker_that_waits_for_a_dead_redis(config, own_redis, start):
    mine = own_redis.serve(changed(config, kwargs={"pause": 0.2}, drain_seconds=1))
    worker = start("worker", mine)
    wait_until(lambda: ledger_of(mine).live.get("ready", 0) >= 4, 30, worker)
    own_redis.kill()
    time.sleep(3)  # every episode ends, or waits to be stored
    worker.popen.send_signal(signal.SIGTERM)
    worker.wait(20)  # a second to drain, and two calls more: the one under way and the one that gives back


def test_an_opening_that_fills_the_context_is_an_error_and_no_episode(config, monkeypatch):
    monkeypatch.setattr("argosy.actors.worker.FAILURES_IN_A_ROW", 4)
    tight = changed(config, context_tokens=10)
    with pytest.raises(TooManyFailures):
        run_worker(tight, 20)
    assert not ledger_of(tight).live.get("ready")
