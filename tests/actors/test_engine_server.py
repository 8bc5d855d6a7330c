"""The engine server's life: it starts with a reason to fail, dies with its SGLang, and leaves nothing behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from argosy.actors.settings import ActorConfig
from argosy.buffer import BufferSettings, ReplayBuffer, WeightLedger
from conftest import Traces, wait_for_engine, wait_until


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
def test_an_engine_dies_during_episodes_and_none_is_lost(own, start):
    """SGLang is killed, the server says so and leaves nothing; started again it carries on; then the server is killed."""
    server = start("engine", own)
    wait_for_engine(own, server)
    worker = start("worker", own.model_copy(update={"name": "actor-0"}))
    buffer = ReplayBuffer(own.buffer)
    wait_until(lambda: buffer.ledger().live.get("ready", 0) >= 8, 60, worker)

    traces = Traces(server)
    assert not traces.shared_memory
    os.kill(traces.sglang, signal.SIGKILL)
    assert server.wait(10) == 1
    assert "SGLang ended with -9" in str(server) and "engine-0.log ends with" in str(server)
    wait_until(lambda: not traces.left(), 5, traces.left())
    assert not WeightLedger(own.buffer).engines()
    stalled = buffer.ledger().live.get("ready", 0)

    server = start("engine", own)
    wait_for_engine(own, server)
    wait_until(lambda: buffer.ledger().live.get("ready", 0) >= stalled + 16, 60, worker)
    ledger = buffer.ledger()
    assert ledger.balanced and not ledger.dropped
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0, str(worker)
    ledger = buffer.ledger()
    assert ledger.balanced and not ledger.live.get("leased")
    assert all("released" not in line for line in str(worker).splitlines())

    traces = Traces(server)
    server.popen.send_signal(signal.SIGKILL)
    server.wait(5)
    wait_until(lambda: not traces.left(), 5, traces.left())


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
