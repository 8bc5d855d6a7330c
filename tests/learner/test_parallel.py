"""Tensor, pipeline and data parallel learners of two ranks over gloo do what one rank does."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from argosy.buffer import Task, Trajectory, write_archive
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("rank_program.py")
LAYOUTS = ["tensor2", "pipeline2", "data2"]
pytestmark = pytest.mark.timeout(400)


def launch(world: int, arguments: list[str]) -> None:
    """Runs the rank program; one rank that fails fails the test with its error, and none outlives it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
            env={**shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=200)
            assert rank.returncode == 0, errors[-3000:]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
                rank.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, episode: Callable[..., Trajectory]) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    generator = np.random.default_rng(11)
    episodes = []
    for index in range(9):  # three groups of two task sources; every other episode has a second context window
        made = episode(
            generator, f"t{index}", reward=float(index % 2), version=index % 3, group=str(index // 3), group_size=3,
            group_index=index % 3, task=Task("a/0", "long" if index // 3 == 1 else "short", 0),
        )  # fmt: skip
        windows = episode(generator).traces if index % 2 else []
        episodes.append(replace(made, traces=[*made.traces, *windows]))
    write_archive(out / "batch", episodes)
    launch(1, [str(model_dir), str(out / "batch"), str(out), "data1"])
    launch(2, [str(model_dir), str(out / "batch"), str(out), *LAYOUTS, "resume:data1"])
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_steps_of_one(layout: str, results: Path) -> None:
    alone, together = (json.loads((results / name / "records.json").read_text()) for name in ("data1", layout))
    assert len(alone) == len(together) == 4
    for expected, got in zip(alone, together, strict=True):
        assert got == pytest.approx(expected, rel=2e-3, abs=1e-4)
    for key in ("loss", "grad_norm", "critic_grad_norm"):  # before AdamW has amplified rounding errors
        assert together[0][key] == pytest.approx(alone[0][key], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_published_weights_are_the_same(layout: str, results: Path) -> None:
    expected = load_file(results / "data1" / "weights" / "model.safetensors")
    folder = results / layout / "weights"
    files = sorted(folder.glob("*.safetensors"))
    got = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(got) == set(expected)
    assert max(float((got[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-3
    if layout == "pipeline2":
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert {name: folder / file for name, file in index.items()} == {
            name: file for file in files for name in load_file(file)
        }


def test_a_checkpoint_of_one_layout_continues_in_another(results: Path) -> None:
    expected = json.loads((results / "data1" / "records.json").read_text())[-1]
    resumed = json.loads((results / "resumed.json").read_text())
    assert resumed == pytest.approx(expected, rel=1e-3, abs=1e-4)
