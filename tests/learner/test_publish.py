import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from argosy.buffer import BufferSettings, WeightLedger
from argosy.learner.model import Policy
from argosy.learner.publish import KEPT, publish
from safetensors.torch import load_file


@pytest.fixture
def ledger(redis_url: str, run_name: str) -> WeightLedger:
    return WeightLedger(BufferSettings(run=run_name, url=redis_url, batch_size=1))


def test_what_is_published_is_the_model(
    model_dir: Path, tmp_path: Path, alone: None, ledger: WeightLedger, reference: Any
) -> None:
    policy = Policy(model_dir)
    with torch.no_grad():
        policy.decoder.final_layernorm.weight.mul_(1.5)
    publish(policy, model_dir, tmp_path, ledger, version=3, step=1, patience=1, stop=threading.Event())
    found = ledger.latest()
    assert found is not None and (found.version, found.step) == (3, 1) and len(found.checksum) == 8
    assert {path.name for path in model_dir.iterdir()} == {path.name for path in Path(found.path).iterdir()}
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (model_dir, found.path))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.norm.weight"}
    assert reference(Path(found.path)).config.vocab_size == policy.architecture.vocab


def test_a_silent_engine_holds_up_neither_the_run_nor_its_end(
    model_dir: Path, tmp_path: Path, alone: None, ledger: WeightLedger
) -> None:
    ledger.register_engine("silent", "http://nowhere", ttl=60, version=0)
    policy, stop = Policy(model_dir), threading.Event()
    stop.set()
    begun = time.monotonic()
    done = publish(policy, model_dir, tmp_path, ledger, version=1, step=0, patience=60, stop=stop)
    assert done.behind == ["silent"] and time.monotonic() - begun < 10


def test_weights_stay_until_every_engine_serves_newer_ones(
    model_dir: Path, tmp_path: Path, alone: None, ledger: WeightLedger
) -> None:
    policy = Policy(model_dir)

    def send(version: int) -> list[str]:
        return publish(
            policy, model_dir, tmp_path, ledger, version, step=version, patience=0.2, stop=threading.Event()
        ).behind

    for engine in ("fast", "slow"):
        ledger.register_engine(engine, "http://nowhere", ttl=60, version=0)
    ledger.confirm("slow", 2)
    for version in range(1, 8):
        ledger.confirm("fast", version)
        assert send(version) == (["slow"] if version > 2 else [])
    kept = sorted(int(path.name[1:]) for path in (tmp_path / "weights").iterdir())
    assert kept == [2, 3, 4, 5, 6, 7]  # the slow engine may still be reading version 2
    ledger.unregister_engine("slow")
    ledger.confirm("fast", 8)
    assert send(8) == []
    assert sorted(int(path.name[1:]) for path in (tmp_path / "weights").iterdir()) == [6, 7, 8][-KEPT:]
