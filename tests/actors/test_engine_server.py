"""The engine server's life: it starts with a reason to fail, dies with its SGLang, and leaves nothing behind."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from argosy.actors.settings import ActorConfig
from argosy.buffer import BufferSettings, ReplayBuffer, WeightLedger
from conftest import Traces, last_line, processes_of, wait_for_engine, wait_until


@pytest.fixture
def own(model: Path, run_name: str, redis_url: str, tmp_path: Path) -> ActorConfig:
    """A run with an engine of its own, which may be killed."""
    return ActorConfig(
        run_dir=tmp_path,
        model=model,
        buffer=BufferSettings(run=run_name, url=redis_url, batch_size=50),
        engine={"start_seconds": 200},
        actor={"concurrency": 8, "max_new_tokens": 16, "context_tokens": 512},
        sources=[{"name": "guess", "env": "arena:Guess", "kwargs": {"pause": 0.05}}],
        name="engine-0",
    )


@pytest.mark.timeout(240)
def test_an_engine_dies_during_episodes_and_none_is_lost(own, engine, engine_config, start):
    """The server gets SIGKILL and nothing of it is left; episodes wait for another engine and go on where they were."""
    server = start("engine", own)
    wait_for_engine(own, server)
    worker = start("worker", own.model_copy(update={"name": "actor-0"}))
    buffer, ledger = ReplayBuffer(own.buffer), WeightLedger(own.buffer)
    wait_until(lambda: buffer.ledger().live.get("ready", 0) >= 8, 60, worker)

    traces = Traces(server)
    assert len(processes_of(traces.sglang)) >= 3 and traces.ports
    server.popen.send_signal(signal.SIGKILL)
    server.wait(5)
    wait_until(lambda: not traces.left(), 5, traces.left())
    wait_until(lambda: "engine engine-0 failed in request" in str(worker), 10, worker)
    waiting = buffer.ledger()
    assert waiting.balanced and waiting.live["leased"] == own.actor.concurrency

    ledger.register_engine("engine-1", WeightLedger(engine_config.buffer).engines()["engine-0"].url, ttl=100)
    wait_until(lambda: buffer.ledger().live.get("ready", 0) >= waiting.live["ready"] + 16, 60, worker)
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0, str(worker)
    done = buffer.ledger()
    assert done.balanced and not done.dropped and not done.live.get("leased")
    assert last_line(own, "actor-0")["failed"] == last_line(own, "actor-0")["late"] == 0


@pytest.mark.timeout(60)
def test_sigterm_ends_a_starting_engine_and_leaves_nothing(own, start):
    server = start("engine", own)
    traces = Traces(server)
    time.sleep(2)  # in the middle of its imports
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait(5) == 0, str(server)
    assert not traces.left() and not WeightLedger(own.buffer).engines()


@pytest.mark.timeout(60)
def test_an_engine_that_cannot_start_says_why(own, start):
    odd = own.model_copy(update={"engine": own.engine.model_copy(update={"arguments": ("--no-such-flag",)})})
    server = start("engine", odd)
    assert server.wait(60) == 1
    assert "unrecognized arguments: --no-such-flag" in str(server)
    slow = own.model_copy(update={"engine": own.engine.model_copy(update={"start_seconds": 1.0})})
    server = start("engine", slow)
    assert server.wait(20) == 1
    assert "SGLang is not healthy after 1 s (engine.start_seconds)" in str(server)
    leftover = [p for p in psutil.process_iter(["cmdline"]) if str(own.model) in (p.info["cmdline"] or [])]
    assert not [p for p in leftover if "--no-such-flag" in p.cmdline()]
