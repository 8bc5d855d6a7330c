"""Workers, both ranks of the learner, a saboteur and Redis are killed with SIGKILL at random: no promise may break.

    python tests/buffer/chaos.py --seeds 20              # make chaos
    python tests/buffer/chaos.py --seed 7 --seconds 60   # one of them, longer

The seed chooses the configuration and the order of the kills, not their exact moment. Exit status 1 at the first broken
promise, with the seed and the folder of what is left.
"""

import argparse
import logging
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from argosy.buffer import BufferSettings, ReplayBuffer
from chaos_processes import CHECKPOINT_EVERY, PEER_LOST, Durable, Life, follow, learn, sabotage, work
from chaos_promises import check
from conftest import RedisServer

PATIENCE_SECONDS = 60.0  # for survivors to make progress, on a busy machine
KINDS: list[dict[str, Any]] = [
    {},
    {"group_size": 4, "group_failures": "pad"},
    {"group_size": 4, "group_failures": "replace", "archive": True},
    {"segments": True, "archive": True},
    {"max_uses": 2},
]
VICTIMS = {
    "worker-0": 3,
    "worker-1": 3,
    "rank 0": 3,
    "rank 1": 2,
    "both ranks": 2,
    "saboteur": 1,
    "redis": 3,
    "power cut": 3,
    "power cut of all": 2,
}


def configure(seed: int, url: str, folder: Path) -> Life:
    rng = random.Random(f"configuration {seed}")
    kind = dict(KINDS[seed % len(KINDS)])
    segments = kind.pop("segments", False)
    if kind.get("max_uses"):
        kind |= rng.choice([{"archive": True}, {"group_size": 2}])
    rules = {
        "run": "chaos",
        "url": url,
        "batch_size": 4,
        "eta": 2,
        "lease_seconds": 1.0,
        "max_tries": rng.choice([2, 5]),
        "order": rng.choice(["oldest", "freshest", "chaos_processes:prefer_short"]),
        "too_old": rng.choice(["finish", "cancel"]),
        "compress": rng.choice(["always", "never"]),
    }
    return Life(BufferSettings.model_validate(rules | kind), segments, folder)


class Fleet:
    """The processes; whoever dies is started again by `tend`, as a supervisor would. Forked: they start in no time."""

    def __init__(self, life: Life, server: RedisServer, seed: int) -> None:
        self.life, self.server, self.rng = life, server, random.Random(seed)
        self.processes: dict[str, ForkProcess] = {}
        self.births = 0
        self.sizes: list[tuple[Path, int, int]] = []  # of the append-only file, and the learner's checkpoint then
        self.kills: Counter[str] = Counter()
        self.buffer = ReplayBuffer(life.settings)

    def tend(self) -> None:
        for name, process in self.processes.items():
            status = process.exitcode
            assert status in (None, -9, PEER_LOST), f"{name} failed with status {status}: see its traceback above"
        if not all(self._lives(rank) for rank in ("rank 0", "rank 1")):
            for rank in ("rank 0", "rank 1"):
                self.kill(rank)
            here, there = multiprocessing.Pipe()
            self._start("rank 0", learn, here)
            self._start("rank 1", lambda life, leader, birth: (here.close(), follow(life, leader)), there)
            here.close()
            there.close()
        for name in ("worker-0", "worker-1"):
            if not self._lives(name):
                self._start(name, work, name)
        if not self._lives("saboteur"):
            self._start("saboteur", sabotage, self.server.client())

    def _lives(self, name: str) -> bool:
        return name in self.processes and self.processes[name].exitcode is None

    def _start(self, name: str, target: Callable[..., Any], argument: Any) -> None:
        self.births += 1
        process = multiprocessing.get_context("fork").Process(target=target, args=(self.life, argument, self.births))
        process.start()
        self.processes[name] = process

    def kill(self, name: str) -> None:
        if name in self.processes:
            self.processes[name].kill()
            self.processes[name].join(20)

    @property
    def forgetful(self) -> bool:
        """Whether Redis may have forgotten what it acknowledged: killed while the disk is slow, it does so as well."""
        return any(self.kills[how] for how in ("redis", "power cut", "power cut of all"))

    def strike(self) -> None:
        victim = self.rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        self.kills[victim] += 1
        if victim == "power cut of all":
            self.close()
        if "rank" in victim:
            for rank in ("rank 0", "rank 1") if victim == "both ranks" else (victim,):
                self.kill(rank)
        elif victim == "redis" or "power cut" in victim:
            self.server.kill(written=False)
            if "power cut" in victim:
                self.server.lose_tail(self.rng.randint(1, self.unsynced()))
            time.sleep(self.rng.choice([0, 0, 0.3]))
            self.server.start()
        else:
            self.kill(victim)

    def look(self) -> None:
        tail = self.server.tail()
        if tail.exists():  # else Redis has begun another one just now
            self.sizes.append((tail, tail.stat().st_size, self._steps()))

    def unsynced(self) -> int:
        """How many bytes a power cut may take: what was written since the checkpoint before the newest.

        The buffer's promise is for a second, which no run's checkpoint intervals come near. Here they do.
        """
        tail, known = self.server.tail(), self._steps() - CHECKPOINT_EVERY
        sizes = [size for path, size, step in self.sizes if path == tail and step >= known]
        return max(1, tail.stat().st_size - min(sizes)) if sizes else 1000

    def run(self, seconds: float) -> None:
        self.wait_for_checkpoints(1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(self.rng.randint(1, 25)):
                time.sleep(0.02)
                self.look()
            self.strike()
            time.sleep(self.rng.choice([0, 0.05]))  # who is left goes on for a moment
            self.tend()
            ledger = self.buffer.ledger()
            assert ledger.balanced, ledger
        self.wait_for_checkpoints(2)
        self.close()

    def wait_for_checkpoints(self, count: int) -> None:
        """Whatever was killed, the survivors must go on."""
        steps = self._steps() + count * CHECKPOINT_EVERY
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._steps() < steps:
            self.tend()
            assert time.monotonic() < deadline, f"stuck at step {self._steps()}: {self.buffer.stats()}"
            time.sleep(0.02)

    def _steps(self) -> int:
        return Durable(self.life.folder).saved["step"]

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)


def run(seed: int, seconds: float) -> Counter[str]:
    """Kills by kind, steps and attempts of one seed; raises AssertionError if a promise breaks."""
    folder = Path(tempfile.mkdtemp(prefix=f"argosy-chaos-{seed}-"))
    server = RedisServer(folder)
    life = configure(seed, server.url, folder)
    (folder / "sabotaged").touch()
    logging.basicConfig(filename=folder / "log", format="%(process)d %(asctime)s %(message)s", force=True)
    fleet = Fleet(life, server.start(), seed)
    try:
        fleet.run(seconds)
        numbers = check(life, server.client(), fleet.forgetful)
    except BaseException:
        print(f"seed {seed}, killed {dict(fleet.kills)}, left in {folder}: {life}", file=sys.stderr)
        raise
    finally:
        fleet.close()
        server.kill(written=False)
    shutil.rmtree(folder, ignore_errors=True)  # a child of the killed server may still be tidying up in it
    print(f"seed {seed}: killed {dict(fleet.kills)}; {numbers}", flush=True)
    return fleet.kills + Counter(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seconds", type=float, default=15.0, help="of killing, for each")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            total += run(seed, options.seconds)
        except AssertionError:
            print(f"again: python tests/buffer/chaos.py --seed {seed} --seconds {options.seconds:g}", file=sys.stderr)
            raise
    workers = total["worker-0"] + total["worker-1"] + total["power cut of all"] * 2
    ranks = total["rank 0"] + total["rank 1"] + 2 * (total["both ranks"] + total["power cut of all"])
    cuts = total["power cut"] + total["power cut of all"]
    print(
        f"{options.seeds} seeds kept every promise: {workers} workers, {ranks} ranks of the learner, "
        f"{total['redis'] + cuts} times Redis killed, {cuts} of them power cuts; "
        f"{total['steps']} steps, {total['attempts']} attempts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
