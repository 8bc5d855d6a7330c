"""Whole learner processes on a real Redis, fed by the test: killed, asked to stop, started again."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from argosy.buffer import BufferSettings, ReplayBuffer, Task, Trajectory, WeightLedger, write_archive
from safetensors.torch import load_file, save_file

BATCH, STEPS, MORE, VALUE_BATCHES = 6, 12, 5, 2
DEADLINE = 100.0


class Voyage:
    """A run of the learner with a producer that answers every lease with a random episode."""

    def __init__(self, run_dir: Path, model: Path, settings: BufferSettings, episode: Callable[..., Trajectory]):
        self.run_dir, self.settings, self.episode = run_dir, settings, episode
        self.buffer = ReplayBuffer(settings)
        self.config = {
            "run_dir": str(run_dir),
            "model": str(model),
            "buffer": settings.model_dump(),
            "learner": {
                "stop": {"steps": STEPS},
                "value": {"batches": VALUE_BATCHES, "updates": 2},
                "policy": {"lr": 1e-3},
                "critic": {"lr": 1e-3},
                "objective": {"low": 1.0, "high": 1e6},
                "checkpoint_every": 4,
            },
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._producer = threading.Thread(target=self._produce)

    def group_up(self, size: int) -> None:
        """Before the first start: lets groups have `size` members."""
        self.settings = self.settings.model_copy(update={"group_size": size})
        self.config["buffer"], self.buffer = self.settings.model_dump(), ReplayBuffer(self.settings)

    def start(self) -> subprocess.Popen[bytes]:
        if not self._producer.is_alive():
            self._producer.start()
        path = self.run_dir / "learner.json"
        path.write_text(json.dumps(self.config))
        errors = (self.run_dir / "stderr").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "argosy.learner", str(path)]
        self.processes.append(subprocess.Popen(command, stderr=errors, env=environment))
        errors.close()
        return self.processes[-1]

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, stage: str, step: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while not any(record["stage"] == stage and record["step"] >= step for record in self.metrics()[-3:]):
            assert self.processes[-1].poll() is None, self.errors()
            assert time.monotonic() < deadline, f"{stage} step {step} was not reached in {DEADLINE:.0f} s"
            time.sleep(0.02)

    def errors(self) -> str:
        return (self.run_dir / "stderr").read_text()[-3000:]

    def close(self) -> None:
        self._over.set()
        if self._producer.ident is not None:
            self._producer.join(20)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(20)

    def _produce(self) -> None:
        generator = np.random.default_rng(0)
        while not self._over.is_set():
            self.buffer.put_tasks(lambda index: Task(f"synthetic/{index}", "synthetic", index), limit=4)
            leases = self.buffer.lease("producer", 4)
            for lease in leases:
                made = self.episode(
                    generator, lease.attempt, version=self.buffer.version(), attempt=lease.attempt, task=lease.task,
                    group=lease.group, group_size=lease.group_size, group_index=lease.group_index,
                )  # fmt: skip
                self.buffer.complete(lease, made)
            if not leases:
                time.sleep(0.01)


@pytest.fixture
def voyage(
    tmp_path: Path, model_dir: Path, redis_url: str, run_name: str, episode: Callable[..., Trajectory]
) -> Iterator[Voyage]:
    settings = BufferSettings(run=run_name, url=redis_url, batch_size=BATCH)
    made = Voyage(tmp_path, model_dir, settings, episode)
    yield made
    made.close()


@pytest.mark.timeout(400)
def test_killed_stopped_and_resumed_it_trains_each_trajectory_once(voyage: Voyage) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    first = voyage.start()
    voyage.wait_for("policy", chance.randrange(1, 7))
    time.sleep(chance.random() * 0.3)
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    seen = voyage.metrics()

    second = voyage.start()
    voyage.wait_for("policy", max(record["step"] for record in seen if record["stage"] == "policy") + 1)
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE) == 3, voyage.errors()
    stopped = voyage.metrics()

    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    voyage.config["learner"]["stop"]["steps"] = STEPS + MORE  # a finished run goes on where it ended
    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    records = voyage.metrics()
    assert [record["step"] for record in records[-MORE:]] == [STEPS + more + 1 for more in range(MORE)]
    # no time between two steps of a process is left out, not even that of a checkpoint
    first, last = records[-MORE], records[-1]
    seconds = sum(record["seconds"] for record in records[-MORE + 1 :])
    assert seconds == pytest.approx(last["time"] - first["time"], abs=0.2)
    # the interrupted process lost nothing, the killed one only steps after its last checkpoint
    assert records[len(stopped)]["step"] == stopped[-1]["step"] + 1
    versions = [record["version"] for record in records]
    assert versions == sorted(versions)
    assert max(record["staleness_max"] for record in records) <= voyage.settings.eta

    voyage.close()
    ledger = voyage.buffer.ledger()
    state = json.loads(max((voyage.run_dir / "checkpoints").iterdir()).joinpath("state.json").read_text())
    assert ledger.balanced and ledger.lost == 0
    assert state["claimed"] == state["committed"] == STEPS + MORE + VALUE_BATCHES
    assert ledger.trained == BATCH * state["claimed"] and ledger.live["claimed"] == 0
    assert state["stage"] == "done" and records[-1]["stage"] == "policy"

    latest = WeightLedger(voyage.settings).latest()
    assert latest is not None and latest.version == state["version"] == voyage.buffer.version()
    assert (Path(latest.path) / "model.safetensors").exists()
    names = sorted(path.name for path in (voyage.run_dir / "samples").iterdir())
    assert names[:2] == ["step-000001.jsonl", "step-000002.jsonl"] and names[-1] == f"step-{STEPS + MORE:06d}.jsonl"
    sample = json.loads((voyage.run_dir / "samples" / names[-1]).read_text().splitlines()[0])["traces"][0]
    for column in ("values", "advantages"):
        assert [value is not None for value in sample[column]] == sample["sampled"]


@pytest.mark.timeout(200)
def test_groups_teach_a_policy_without_a_critic(voyage: Voyage) -> None:
    voyage.group_up(2)
    voyage.config["learner"] |= {  # type: ignore[operator]
        "value": None, "stop": {"steps": 3}, "advantage": {"name": "rloo"}, "minibatches": 2,
        "objective": {"name": "gspo", "low": 0.5, "high": 9.0, "kl": {"weight": 0.01}},
    }  # fmt: skip
    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    records = voyage.metrics()
    assert len(records) == 3 and {record["stage"] for record in records} == {"policy"}
    for record in records:
        assert record["critic_loss"] is record["explained_variance"] is None
        assert record["episodes"] == 2 * BATCH and 0 <= record["zero_variance_groups"] < 1
        assert record["grad_norm"] > 0 and record["masked_share"] < 1
    assert 0 <= records[0]["reference_kl"] < records[-1]["reference_kl"]
    assert records[-1]["version"] == records[0]["version"] + 2
    checkpoints = sorted((voyage.run_dir / "checkpoints").iterdir())
    assert [path.name for path in checkpoints[-1].iterdir() if path.is_dir()] == ["policy"]

    voyage.config["learner"] |= {"stop": {"steps": 4}, "advantage": {}, "objective": {}}  # type: ignore[operator]
    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    assert [record["critic_loss"] is None for record in voyage.metrics()] == [True, True, True, False]


@pytest.mark.timeout(200)
def test_the_critic_may_learn_alone_at_first(voyage: Voyage) -> None:
    voyage.config["learner"] |= {  # type: ignore[operator]
        "value": None, "stop": {"steps": 3}, "critic": {"lr": 1e-3, "warmup": 2, "updates": 2, "value_clip": 0.2},
    }  # fmt: skip
    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    records = voyage.metrics()
    assert [record["loss"] is None for record in records] == [True, True, False]
    assert all(record["critic_grad_norm"] > 0 for record in records) and records[-1]["skipped"] == 0
    first, second, third = (record["version"] for record in records)
    assert first == second < third


@pytest.mark.timeout(300)
def test_supervised_learning_comes_first_and_success_ends_the_run(voyage: Voyage, tmp_path: Path) -> None:
    generator = np.random.default_rng(9)
    lesson = voyage.episode(generator, "lesson", length=40)
    write_archive(tmp_path / "lessons", [lesson] * 4)
    voyage.config["learner"]["supervised"] = {  # type: ignore[index]
        "data": str(tmp_path / "lessons"), "steps": 40, "batch_size": 4, "lr": 1e-2, "warmup_steps": 5,
    }  # fmt: skip
    voyage.config["learner"]["stop"] = {"steps": 50, "success": 0.0, "window": 2 * BATCH}  # type: ignore[index]
    assert voyage.start().wait(DEADLINE) == 0, voyage.errors()
    records = voyage.metrics()
    losses = [record["loss"] for record in records if record["stage"] == "supervised"]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    assert [record["step"] for record in records if record["stage"] == "value"] == [1, 2]
    # the value batches fill the window, so no policy step is needed
    assert not [record for record in records if record["stage"] == "policy"]
    # what was sampled before the first published weights is too old to be claimed
    assert records[-1]["version"] > voyage.settings.eta
    assert all(record["staleness_max"] == 0 for record in records if record["stage"] == "value")


@pytest.mark.timeout(200)
def test_weights_that_are_not_finite_end_the_run_with_their_batch_kept(
    voyage: Voyage, model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model_dir.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    voyage.config |= {"model": str(broken)}
    voyage.config["learner"] |= {"value": None}  # type: ignore[operator]
    assert voyage.start().wait(DEADLINE) == 1
    assert "NonFinite: 3 steps in a row were refused" in voyage.errors()
    assert len(list((tmp_path / "refused").iterdir())) == 3


def test_a_misspelt_setting_is_named_before_anything_starts(tmp_path: Path, voyage: Voyage) -> None:
    voyage.config["learner"] |= {"checkpont_every": 3}  # type: ignore[operator]
    path = tmp_path / "learner.json"
    path.write_text(json.dumps(voyage.config))
    command = [sys.executable, "-m", "argosy.learner", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "checkpont_every" in done.stderr


@pytest.mark.timeout(100)
def test_no_rank_outlives_torchrun(voyage: Voyage, tmp_path: Path) -> None:
    path = tmp_path / "learner.json"
    path.write_text(json.dumps(voyage.config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*torchrun, "-m", "argosy.learner", str(path)], stderr=subprocess.DEVNULL) as running:
        parent, deadline = psutil.Process(running.pid), time.monotonic() + DEADLINE
        while not (len(ranks := parent.children()) == 2 and all(map(imports_torch, ranks))):
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        running.kill()
    _, alive = psutil.wait_procs(ranks, timeout=1)
    alive = [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
    for rank in alive:
        rank.kill()
    assert not alive


def imports_torch(process: psutil.Process) -> bool:
    return any("libtorch" in area.path for area in process.memory_maps())
