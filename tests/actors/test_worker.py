"""Whole episodes on the real engine, and what happens to them when something dies."""

import asyncio
import signal
import subprocess
import time

import pytest
from argosy.actors.errors import TooManyFailures
from argosy.actors.worker import Worker
from argosy.buffer import ReplayBuffer, WeightLedger
from conftest import changed, last_line, ledger_of, ready, run_worker, wait_until


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
    assert str(worker).strip().endswith("module 'arena' has no 'Gess'")
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
def test_a_redis_restart_loses_nothing(config, tmp_path):
    """Redis is killed and started again while episodes run and end; each finished one arrives."""
    command = ["redis-server", "--port", "0", "--unixsocket", str(tmp_path / "r.sock"), "--dir", str(tmp_path)]
    command += ["--appendonly", "yes", "--save", ""]
    url = f"unix://{tmp_path}/r.sock"
    mine = changed(config, kwargs={"pause": 0.1})
    patient = {"url": url, "batch_size": 50, "lease_seconds": 30}  # a busy machine is no reason to lose a lease here
    mine = mine.model_copy(update={"buffer": mine.buffer.model_copy(update=patient)})
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        record = WeightLedger(config.buffer).engines()["shared"]
        WeightLedger(mine.buffer).register_engine("shared", record.url, ttl=1000)

        async def run() -> Worker:
            nonlocal server
            worker = Worker(mine)
            running = asyncio.create_task(worker.run())
            while worker.counters.episodes < 8:
                await asyncio.sleep(0.05)
            server.kill()
            await asyncio.to_thread(server.wait)
            await asyncio.sleep(2.5)  # every running episode ends meanwhile and has nowhere to go
            at_restart = worker.counters.episodes
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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
    finally:
        server.kill()
        server.wait()


def test_an_opening_that_fills_the_context_is_an_error_and_no_episode(config, monkeypatch):
    monkeypatch.setattr("argosy.actors.worker.FAILURES_IN_A_ROW", 4)
    tight = changed(config, context_tokens=10)
    with pytest.raises(TooManyFailures):
        run_worker(tight, 20)
    assert not ledger_of(tight).live.get("ready")
