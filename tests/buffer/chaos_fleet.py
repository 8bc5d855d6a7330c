"""The processes that the chaos test kills: `python chaos_fleet.py worker|learner SETTINGS.json FOLDER NAME`.

The learner has no model: its "weights" are the list of attempts it trained on, so that its checkpoint is the lineage
and every promise of the buffer can be checked against it.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from argosy.buffer import BufferSettings, Lease, PayloadLost, ReplayBuffer, Task, Trace, Trajectory

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


def work(buffer: ReplayBuffer, name: str, rng: random.Random) -> None:
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


def main(role: str, settings_path: str, folder: str, name: str) -> None:
    settings = BufferSettings.model_validate_json(Path(settings_path).read_text())
    if role == "worker":
        work(ReplayBuffer(settings), name, random.Random(name))
    learner = Learner(settings, Path(folder))
    learner.start()
    try:
        while True:
            learner.train()
    except PayloadLost as lost:
        print(lost, file=sys.stderr)
        sys.exit(PAYLOAD_LOST)


if __name__ == "__main__":
    main(*sys.argv[1:])
