"""Is a directory of weights what a running engine can load? Asked before the engine is told to.

SGLang writes the new tensors over the old ones as it reads them and, when it fails half way, tries to restore them from
the same broken files. So a checkpoint that it cannot load must never reach it: names and shapes have to be those of the
model that is being served, and no file may be cut short. Only headers are read; types may differ, SGLang converts.
"""

import json
from pathlib import Path

from .errors import EngineFailed

MAX_HEADER = 100_000_000  # safetensors' own limit


Shapes = dict[str, tuple[int, ...]]


def shapes(model: Path) -> Shapes:
    """Shape of every tensor in the directory's safetensors; EngineFailed says which file is broken."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise EngineFailed(f"{model} holds no safetensors")
    return {name: tuple(tensor["shape"]) for file in files for name, tensor in _header(file).items()}


def check(model: Path, like: Shapes) -> None:
    """Raises EngineFailed unless `model` holds the same tensors."""
    found = shapes(model)
    odd = sorted(name for name in like.keys() | found.keys() if like.get(name) != found.get(name))
    if odd:
        raise EngineFailed(
            f"{model} does not hold the served model: {len(odd)} tensors differ, {odd[0]} is "
            f"{found.get(odd[0], 'missing')}, the served one is {like.get(odd[0], 'missing')}"
        )


def _header(file: Path) -> dict[str, dict]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, MAX_HEADER)))
        header.pop("__metadata__", None)
        end = 8 + size + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EngineFailed(f"{file} is no readable safetensors file: {error}") from error
    if file.stat().st_size != end:
        raise EngineFailed(f"{file} has {file.stat().st_size} bytes where its header promises {end}")
    return header
