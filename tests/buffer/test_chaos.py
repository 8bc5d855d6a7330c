"""Workers, the learner and Redis are killed with SIGKILL at random; no promise of the buffer may break."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
import redis
from argosy.buffer import BufferSettings, ReplayBuffer

if TYPE_CHECKING:
    from conftest import RedisServer

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("CHAOS_SECONDS", "8"))
PAYLOAD_LOST = 17
WORKERS = ("worker-0", "worker-1")


class Fleet:
    """The processes; whoever dies is started again by `tend`, as a supervisor would."""

    def __init__(self, settings: BufferSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.path = folder / "settings.json"
        self.path.write_text(settings.model_dump_json())
        self.log: IO[bytes] = (folder / "log").open("wb")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def tend(self) -> None:
        for name in (*WORKERS, "learner"):
            process = self.processes.get(name)
            status = None if process is None else process.poll()
            assert status in (None, -9, PAYLOAD_LOST), f"{name} failed:\n{(self.folder / 'log').read_text()}"
            if process is None or status is not None:
                command = [sys.executable, str(HERE / "chaos_fleet.py"), name.partition("-")[0]]
                arguments = [str(self.path), str(self.folder), f"{name}/{time.monotonic()}"]
                self.processes[name] = subprocess.Popen([*command, *arguments], stderr=self.log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(20)

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)
        self.log.close()

    def checkpoint(self) -> dict[str, list[str]]:
        path = self.folder / "checkpoint.json"
        return json.loads(path.read_text())["trained"] if path.exists() else {}


@pytest.fixture
def fleet(redis_server: "RedisServer", tmp_path: Path) -> Iterator[Fleet]:
    rules = {"run": "chaos", "url": redis_server.url, "batch_size": 4, "eta": 2, "lease_seconds": 1.0, "max_tries": 5}
    fleet = Fleet(BufferSettings.model_validate(rules), tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("seed", json.loads(os.environ.get("CHAOS_SEEDS", "[1]")))
def test_no_promise_breaks(seed: int, fleet: Fleet, redis_server: "RedisServer") -> None:
    rng = random.Random(seed)
    fleet.tend()
    kills = dict.fromkeys((*WORKERS, "learner", "redis", "power cut"), 0)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.1, 0.8))
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
    _, trained = wait_for_more_training(fleet)
    fleet.close()
    check(fleet, redis_server.client())
    print(f"seed {seed}: {kills}, trained {trained}")


def wait_for_more_training(fleet: Fleet) -> tuple[int, int]:
    """The survivors must still make progress: three more checkpoints."""
    before = len(fleet.checkpoint())
    deadline = time.monotonic() + 40
    while len(fleet.checkpoint()) < before + 9:
        fleet.tend()
        assert time.monotonic() < deadline, f"stuck at step {len(fleet.checkpoint())}"
        time.sleep(0.05)
    return before, sum(map(len, fleet.checkpoint().values()))


def check(fleet: Fleet, client: redis.Redis) -> None:
    buffer = ReplayBuffer(fleet.settings)
    lineage = fleet.checkpoint()
    trained = [attempt for ids in lineage.values() for attempt in ids]
    assert len(trained) == len(set(trained)), "trained twice in the surviving lineage"
    last = max(map(int, lineage))
    buffer.rewind(last, [attempt for step, ids in lineage.items() if int(step) > last - 6 for attempt in ids])

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
