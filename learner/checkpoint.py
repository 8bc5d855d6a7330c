"""Checkpoints: everything a restarted learner needs to go on as if it had not stopped.

Invariant: a folder {run_dir}/checkpoints/NNNNNN exists only when it is whole and on disk (it is renamed into place
last), and training continued from it is the training that would have gone on, bit for bit on the same layout. The
weights and optimizer states are sharded and can be loaded under another tensor, pipeline or data parallel size. There
is no generator state to keep: every random choice is a function of the seed and the step.
"""

import json
import os
import queue
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async

from . import ranks
from .optimization import Trainee

KEPT = 2  # a newest one that turns out unreadable leaves one to go back to


def save(run_dir: Path, number: int, trainees: Mapping[str, Trainee], state: Mapping[str, Any]) -> Path:
    """Writes checkpoint `number` (never one that exists) of all ranks; returns its folder once it is durable."""
    folder = _folder(run_dir) / f"{number:06d}"
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if ranks.is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        for name in trainees:
            (unfinished / name).mkdir(parents=True)
        (unfinished / "state.json").write_text(json.dumps(state))
    dist.barrier()
    # Megatron would start a process to serve this queue, for writers in other processes; ours write in this one, and
    # that process would outlive a learner that is killed.
    filesystem_async._results_queue = queue.SimpleQueue()
    for name, trainee in trainees.items():
        content = {key: value for key, value in _metadata().items() if key != "dp_cp_group"}
        dist_checkpointing.save(_sharded(trainee, loading=False), unfinished / name, content_metadata=content)
    if ranks.is_first():
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush(path)
        unfinished.rename(folder)
        _flush(folder.parent)
        for old in _complete(run_dir)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return folder


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, the same on every rank."""
    complete = _complete(run_dir)
    return ranks.agree(complete[-1] if complete else None)


def load(folder: Path, trainees: Mapping[str, Trainee]) -> dict[str, Any]:
    """Restores weights and optimizers in place and returns the state that was saved with them."""
    for name, trainee in trainees.items():
        sharded = _sharded(trainee, loading=True)
        strategy = get_default_load_sharded_strategy(str(folder / name))
        loaded = dist_checkpointing.load(sharded, str(folder / name), strategy)
        trainee.model.load_state_dict(loaded["model"])
        trainee.optimizer.load_state_dict(loaded["optimizer"])
        _separate_steps(trainee.optimizer)
    return json.loads((folder / "state.json").read_text())


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _complete(run_dir: Path) -> list[Path]:
    return sorted(path for path in _folder(run_dir).glob("*") if path.name.isdigit())


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded(trainee: Trainee, loading: bool) -> dict[str, Any]:
    _materialise(trainee.optimizer)
    metadata = _metadata()
    model = trainee.model.sharded_state_dict(metadata=metadata)
    optimizer = trainee.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if each.optimizer is not None]


def _materialise(optimizer: Any) -> None:
    """Megatron reads and fills AdamW's state, so it must exist; torch makes it at the first step only."""
    for inner in _inner(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def _separate_steps(optimizer: Any) -> None:
    """Megatron gives every parameter the same `step` tensor, which AdamW would then advance once per parameter."""
    for inner in _inner(optimizer):
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
