"""Workers, the learner and Redis are killed with SIGKILL at random; no promise of the buffer may break.

The learner has no model: its "weights" are the list of attempts it trained on, so that its checkpoint is the lineage
and every promise can be checked against it. CHAOS_SEEDS="[1, 2, 3]" and CHAOS_SECONDS=60 make the test longer.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import redis
from argosy.buffer import BufferSettings, Lease, PayloadLost, ReplayBuffer, Task, Trace, Trajectory

if TYPE_CHECKING:
    from conftest import RedisServer

SECONDS = float(os.environ.get("CHAOS_SECONDS", "6"))
SEEDS = json.loads(os.environ.get("CHAOS_SEEDS", "[1]"))
PAYLOAD_LOST = 17  # exit status: a power cut took payloads that were already claimed; the restart rewinds
CHECKPOINT_EVERY = 3


def task(index: int) -> Task:
    return Task(f"chaos/{index}", f"source-{index % 2}", index)


def bring(lease: Lease, versions: list[int]) -> Trajectory:
    column = np.array([-1, *versions])
    sampled = column >= 0
    trace = Trace(np.arange(len(column)), sampled, np.where(sampled, -1.0, 0.0), column)
    where = (lease.attempt, lease.task, lease.group, lease.group_size, lease.group_index)
    return Trajectory(lease.token, *where, "chaos", "terminated", 1.0, {}, [trace])


def work(settings: BufferSettings, name: str) -> None:
    buffer, rng = ReplayBuffer(settings), random.Random(name)
    while True:
        buffer.put_tasks(task, rng.randint(1, 4))
        leases = buffer.lease(name, rng.randint(1, 6))
        if not leases:
            buffer.wait(0.2)
        for lease in leases:
            dice = rng.random()
            if dice < 0.03:
                continue  # hang: the lease expires
            if dice < 0.06:
                buffer.fail(lease, "sandbox_gone")
                continue
            versions = [buffer.version()]
            if dice < 0.2:
                buffer.checkpoint(lease, bring(lease, versions))
                time.sleep(0.01 * rng.random())
                versions.append(buffer.version())
            buffer.complete(lease, bring(lease, versions))
            if dice > 0.9:
                buffer.complete(lease, bring(lease, versions))  # as if the answer had been lost


class Learner:
    def __init__(self, settings: BufferSettings, folder: Path) -> None:
        self.settings, self.path = settings, folder / "checkpoint.json"
        self.saved: dict[str, Any] = {"step": 0, "version": 0, "trained": {}}
        if self.path.exists():
            self.saved = json.loads(self.path.read_text())
        self.step, self.version = self.saved["step"], self.saved["version"]
        self.trained: dict[int, list[str]] = {int(step): ids for step, ids in self.saved["trained"].items()}
        self.claimed: dict[int, list[str]] = {}  # not yet committed
        self.buffer = ReplayBuffer(settings, self.reconcile)

    def recently_trained(self) -> list[str]:
        steps = range(self.saved["step"] - 2 * CHECKPOINT_EVERY + 1, self.saved["step"] + 1)
        return [attempt for step in steps for attempt in self.trained.get(step, [])]

    def reconcile(self) -> None:
        self.buffer.reconcile(self.claimed, self.recently_trained(), self.version)

    def start(self) -> None:
        self.buffer.rewind(self.step, self.recently_trained())
        self.publish()

    def publish(self) -> None:
        self.version = self.buffer.next_version(at_least=self.version)
        self.buffer.publish(self.version, self.step)

    def train(self) -> None:
        ids = self.buffer.claim(self.step + 1)
        if ids is None:
            self.buffer.wait(0.2)
            return
        self.claimed[self.step + 1] = ids
        for trajectory in self.buffer.get(ids):
            oldest = trajectory.oldest_version
            assert oldest is not None and self.version - oldest <= self.settings.eta, (self.version, trajectory)
        assert len(ids) == self.settings.batch_size, ids
        self.step += 1
        self.trained[self.step] = ids
        self.publish()
        if self.step % CHECKPOINT_EVERY == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        saved = {"step": self.step, "version": self.version, "trained": self.trained}
        half = self.path.with_suffix(".tmp")
        half.write_text(json.dumps(saved))
        half.replace(self.path)
        self.saved = saved
        self.buffer.commit(self.step)
        self.claimed = {step: ids for step, ids in self.claimed.items() if step > self.step}


def learn(settings: BufferSettings, folder: Path) -> None:
    learner = Learner(settings, folder)
    learner.start()
    try:
        while True:
            learner.train()
    except PayloadLost as lost:
        print(lost, file=sys.stderr)
        sys.exit(PAYLOAD_LOST)


class Fleet:
    """The processes; whoever dies is started again by `tend`, as a supervisor would. Forked: they start in no time."""

    def __init__(self, settings: BufferSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.processes: dict[str, ForkProcess] = {}
        self.births = 0

    def tend(self) -> None:
        for name in ("worker-0", "worker-1", "learner"):
            process = self.processes.get(name)
            status = None if process is None else process.exitcode
            assert status in (None, -9, PAYLOAD_LOST), f"{name} failed with status {status}, see its traceback"
            if process is None or status is not None:
                self.processes[name] = self._start(name)

    def _start(self, name: str) -> ForkProcess:
        self.births += 1
        target: Callable[..., None] = learn if name == "learner" else work
        argument = self.folder if name == "learner" else f"{name}, birth {self.births}"
        process = multiprocessing.get_context("fork").Process(target=target, args=(self.settings, argument))
        process.start()
        return process

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join(20)

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)

    def lineage(self) -> dict[str, list[str]]:
        path = self.folder / "checkpoint.json"
        return json.loads(path.read_text())["trained"] if path.exists() else {}

    def wait_for_checkpoints(self, count: int) -> None:
        """Whatever was killed, the survivors must go on."""
        steps = len(self.lineage()) + count * CHECKPOINT_EVERY
        deadline = time.monotonic() + 30
        while len(self.lineage()) < steps:
            self.tend()
            assert time.monotonic() < deadline, f"stuck at step {len(self.lineage())}"
            time.sleep(0.02)


@pytest.fixture
def fleet(redis_server: "RedisServer", tmp_path: Path) -> Iterator[Fleet]:
    rules = {"run": "chaos", "url": redis_server.url, "batch_size": 4, "eta": 2, "lease_seconds": 1.0, "max_tries": 5}
    fleet = Fleet(BufferSettings.model_validate(rules), tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_breaks(seed: int, fleet: Fleet, redis_server: "RedisServer") -> None:
    rng = random.Random(seed)
    fleet.wait_for_checkpoints(1)
    kills = dict.fromkeys(("worker-0", "worker-1", "learner", "redis", "power cut"), 0)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.02, 0.5))
        victim = rng.choice(list(kills))
        kills[victim] += 1
        if victim in ("redis", "power cut"):
            redis_server.kill()
            if victim == "power cut":
                redis_server.lose_tail(rng.randint(1, 6000))
            redis_server.start()
        else:
            fleet.kill(victim)
        fleet.tend()
    fleet.wait_for_checkpoints(2)
    fleet.close()
    check(fleet, redis_server.client())
    print(f"seed {seed}: {kills}, {len(fleet.lineage())} steps")


def check(fleet: Fleet, client: redis.Redis) -> None:
    buffer = ReplayBuffer(fleet.settings)
    lineage = fleet.lineage()
    trained = [attempt for ids in lineage.values() for attempt in ids]
    assert len(trained) == len(set(trained)), "trained twice in the surviving lineage"
    last = max(map(int, lineage))
    buffer.rewind(
        last, [attempt for step, ids in lineage.items() if int(step) > last - 2 * CHECKPOINT_EVERY for attempt in ids]
    )

    ledger = buffer.ledger()
    assert ledger.balanced, ledger
    assert ledger.live["claimed"] == 0
    states = {f"{i}/0": buffer.state(f"{i}/0") or "lost" for i in range(buffer.stats()["next_index"])}
    assert len(states) == ledger.created
    assert {attempt for attempt, state in states.items() if state.startswith("trained")} == set(trained)
    assert sum(state.startswith("dropped") for state in states.values()) == sum(ledger.dropped.values())
    live = {attempt for attempt, state in states.items() if ":" not in state and state != "trained"}
    assert "lost" not in states.values()
    assert len(live) == sum(ledger.live.values())
    check_keys(client, live)
    ready = [attempt for attempt, state in states.items() if state == "ready"]
    assert [trajectory.attempt for trajectory in buffer.get(ready)] == ready
    buffer.close()


def check_keys(client: redis.Redis, live: set[str]) -> None:
    """Every key belongs to something that lives, or is bound to expire."""
    fixed = {"control", "ledger", "queued", "leased", "ready", "claimed", "complete", "active"}
    fixed |= {"manifests", "unborn", "failures", "bell"}
    for key in client.scan_iter("*", count=1000):
        kind, _, rest = key.decode().removeprefix("{chaos}:").partition(":")
        belongs = {
            "attempt": rest in live,
            "group": f"{rest}/0" in live,
            "payload": rest.rpartition(":")[0] in live,
            "partial": rest.rpartition(":")[0] in live,
            "history": True,
        }
        assert kind in fixed or belongs.get(kind) or client.pttl(key) != -1, f"{key!r} is an orphan"
