"""The ranks of one learner: how they start, and how they agree.

Invariant: every decision that changes what a rank does next (which batch, skip, stop) is made from numbers that all
ranks hold alike; this module is the only place they exchange them. Ranks that share a data-parallel index hold the same
batch; only the last pipeline stage computes outputs, and tells the others.

A wait between ranks ends after `DEADLINE`: a rank whose partner died fails with torch's error instead of hanging.
"""

import datetime
import math
import os
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from .settings import ParallelSettings

T = TypeVar("T")
DEADLINE = datetime.timedelta(minutes=30)  # longer than the longest wait for a batch of one rank on behalf of all


def start(settings: ParallelSettings, seed: int) -> None:
    """Joins the process group that RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT describe; alone when they are not set.

    Raises ValueError if the world cannot be divided as the settings ask.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % (settings.tensor * settings.pipeline):
        raise ValueError(f"{world} ranks are no multiple of tensor {settings.tensor} x pipeline {settings.pipeline}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=DEADLINE)
    divide(settings, seed)


def divide(settings: ParallelSettings, seed: int) -> None:
    """Divides the ranks that have joined among tensor, pipeline and data parallelism."""
    parallel_state.initialize_model_parallel(settings.tensor, settings.pipeline)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def stop() -> None:
    """Leaves the process group."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the one rank that talks to the world: files, metrics, the buffer's transitions."""
    return dist.get_rank() == 0


def number() -> int:
    """This rank's number among all."""
    return dist.get_rank()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def shard(items: list[T]) -> list[T]:
    """This rank's share of what all ranks hold alike: every n-th item for n data-parallel ranks."""
    return items[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]


def places(count: int) -> np.ndarray:
    """Where the `count` items that `shard` dealt to this rank stand among those of all."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return np.arange(count) * ranks + rank


def agree(value: T) -> T:
    """The first rank's `value` (any picklable object), on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(items: list[T]) -> list[T]:
    """The lists of all data-parallel ranks, joined, on every rank."""
    size = parallel_state.get_data_parallel_world_size()
    if size == 1:
        return items
    parts: list[list[T]] = [[] for _ in range(size)]
    dist.all_gather_object(parts, items, group=parallel_state.get_data_parallel_group())
    return [item for part in parts for item in part]


def total(array: np.ndarray) -> np.ndarray:
    """The sum of float64 `array` over data-parallel ranks, the same on every rank."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return array
    tensor = torch.from_numpy(np.asarray(array, np.float64)).to(device())
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return tensor.cpu().numpy()


def moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the values of all data-parallel ranks; (0, 0) when there are none."""
    count, whole = total(np.array([len(values), values.sum()], np.float64))
    mean = whole / max(count, 1.0)
    return float(mean), math.sqrt(total(np.array([((values - mean) ** 2).sum()]))[0] / max(count, 1.0))


def highest(array: np.ndarray) -> np.ndarray:
    """The elementwise maximum of float64 `array` over data-parallel ranks, the same on every rank."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return array
    tensor = torch.from_numpy(np.asarray(array, np.float64)).to(device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return tensor.cpu().numpy()


def from_last_stage(arrays: list[np.ndarray] | None) -> list[np.ndarray]:
    """What the last pipeline stage computed, on every stage; `arrays` is None on the others."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert arrays is not None
        return arrays
    box = [arrays]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    assert box[0] is not None
    return box[0]
