"""Weights out to the engines: versioned model directories and the announcement that they exist.

Invariant: {run_dir}/weights/vNNNNNN is a complete Hugging Face directory from the moment it exists (it is renamed into
place), it never changes, and it is removed only when every live engine has confirmed newer weights. So an engine never
loads half a model or one that vanished. A version id is never used twice (the buffer guarantees it).
"""

import json
import shutil
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from ..buffer import WeightLedger, WeightVersion
from . import ranks
from .hf_weights import export_hf
from .model import Policy

KEPT = 3  # directories that stay in any case
CHUNK = 1 << 20
STOP_SLICE = 1.0  # seconds between two looks at whether the process was asked to stop


@dataclass(frozen=True)
class Published:
    """What became of an announcement."""

    seconds: float
    """From the first tensor to the last confirmation, or to the end of patience."""
    behind: list[str]
    """Live engines that did not confirm in time; they catch up on their own."""


def publish(
    policy: Policy,
    source: Path,
    run_dir: Path,
    ledger: WeightLedger,
    version: int,
    step: int,
    patience: float,
    stop: threading.Event,
) -> Published:
    """Writes the policy's weights as `version`, announces them and waits up to `patience` seconds for the engines.

    `source` is the directory the model came from: what is no weight (config, tokenizer, template) is linked from there.
    A set `stop` ends the wait within a second: engines may already be gone. All ranks call it, all get the same answer.
    """
    begun = time.monotonic()
    folder = write(policy, source, run_dir / "weights" / f"v{version:06d}")
    behind: list[str] = []
    if ranks.is_first():
        ledger.publish(WeightVersion(version, str(folder.resolve()), step, _checksum(folder), time.time()))
        behind = _wait(ledger, version, patience, stop)
        _remove_old(folder.parent, min((engine.version for engine in ledger.engines().values()), default=version))
    return ranks.agree(Published(time.monotonic() - begun, behind))


def write(policy: Policy, source: Path, folder: Path) -> Path:
    """Writes the policy as a Hugging Face directory, one safetensors file per pipeline stage, and returns `folder`."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if ranks.is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                (unfinished / file.name).symlink_to(file.resolve())
    dist.barrier()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    name = "model.safetensors" if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
    tensors = {key: tensor.contiguous().cpu() for key, tensor in export_hf(policy)}
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0:
        save_file(tensors, unfinished / name, metadata={"format": "pt"})
    if stages > 1:
        files: list[dict[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(files, dict.fromkeys(tensors, name))
        if ranks.is_first():
            where = {key: file for part in files for key, file in part.items()}
            index = {"metadata": {}, "weight_map": where}
            (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    if ranks.is_first():
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def _wait(ledger: WeightLedger, version: int, patience: float, stop: threading.Event) -> list[str]:
    deadline = time.monotonic() + patience
    while True:
        left = deadline - time.monotonic()
        behind = ledger.wait_confirmed(version, min(max(left, 0.0), STOP_SLICE))
        if not behind or left <= STOP_SLICE or stop.is_set():
            return behind


def _checksum(folder: Path) -> str:
    """CRC-32 of the weight files in order of name, as eight hexadecimal digits."""
    value = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def newest_written(run_dir: Path) -> int:
    """The highest version that was ever written and is still there; 0 if none."""
    return max(_versions(run_dir / "weights"), default=0)


def _remove_old(weights: Path, served: int) -> None:
    versions = _versions(weights)
    for version in sorted(versions)[:-KEPT]:
        if version < served:
            shutil.rmtree(versions[version])


def _versions(weights: Path) -> dict[int, Path]:
    return {int(path.name[1:]): path for path in weights.glob("v*") if path.name[1:].isdigit()}
