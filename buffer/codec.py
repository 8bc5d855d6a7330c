"""A trajectory as bytes: a fixed header, then a msgpack map whose columns are raw little-endian bytes in ext types.

Invariant: `unpack` returns a consistent trajectory or raises a `CodecError`, and allocates no more than a small
multiple of MAX_BYTES whatever the blob claims. The header's sizes are checked against the real ones before anything is
decompressed, the checksum before anything is parsed, and no count inside is believed beyond the bytes that carry it.

    header = magic "ARGO" | schema u16 | flags u16 | crc32 u32 | stored bytes u64 | raw bytes u64      (little-endian)

The checksum covers the header's other fields and the stored bytes. It finds accidents; against forgery there are TLS
and passwords.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from .errors import CorruptBlob, InvalidTrajectory, MalformedBlob, NewerSchema, TruncatedBlob
from .trajectory import SCHEMA, Task, Trace, Trajectory, Turn

MAX_BYTES = 1 << 30
# zstd-1 packs at 0.65 GB/s, Redis takes 1 GB/s on a unix socket: below this size compression costs more than it saves.
COMPRESS_ABOVE = 1 << 20
MAX_ITEMS = 1 << 14  # of a list or map: turns, rewards, traces; msgpack allocates a list before it has read the items
_HEADER = struct.Struct("<4sHHIQQ")
_FRAME = struct.Struct("<Q")
_MAGIC = b"ARGO"
_COMPRESSED = 1
_INT32, _FLOAT32, _BITS, _RUNS = 1, 2, 3, 4

T = TypeVar("T")


def pack(trajectory: Trajectory) -> bytes:
    """The trajectory as bytes; equal trajectories give equal bytes."""
    if trajectory.schema != SCHEMA:
        raise InvalidTrajectory(f"only schema {SCHEMA} can be written, not {trajectory.schema}")
    raw: bytes = msgpack.packb(_to_map(trajectory))
    if len(raw) > MAX_BYTES:
        raise InvalidTrajectory(f"{trajectory.id} takes {len(raw)} bytes; the limit is {MAX_BYTES}")
    compressed = len(raw) > COMPRESS_ABOVE
    stored = zstandard.ZstdCompressor(level=1).compress(raw) if compressed else raw
    flags = _COMPRESSED if compressed else 0
    return _header(SCHEMA, flags, stored, len(raw)) + stored


def unpack(blob: bytes) -> Trajectory:
    """The trajectory in these bytes, or a CodecError that says what is wrong with them."""
    stored, flags, size = _open(memoryview(blob))
    raw = _decompress(stored, size) if flags & _COMPRESSED else stored
    try:
        content = msgpack.unpackb(
            raw,
            ext_hook=_column,
            max_str_len=1 << 20,
            max_bin_len=0,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=size,
        )
        return _from_map(content)
    except MalformedBlob:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedBlob(f"the content is not a trajectory: {error!r}") from error


def write_archive(path: Path | str, trajectories: Iterable[Trajectory]) -> int:
    """Write trajectories to one file, each blob preceded by its length (u64); returns how many."""
    count = 0
    with Path(path).open("wb") as file:
        for trajectory in trajectories:
            blob = pack(trajectory)
            file.write(_FRAME.pack(len(blob)) + blob)
            count += 1
    return count


def read_archive(path: Path | str) -> Iterator[Trajectory]:
    """Read what `write_archive` wrote, one at a time."""
    left = Path(path).stat().st_size
    with Path(path).open("rb") as file:
        while left:
            frame = file.read(_FRAME.size)
            size = _FRAME.unpack(frame)[0] if len(frame) == _FRAME.size else left + 1
            left -= _FRAME.size + size
            if left < 0:
                raise TruncatedBlob(f"{path} ends inside a trajectory")
            yield unpack(file.read(size))


def _header(schema: int, flags: int, stored: bytes | memoryview, size: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, schema, flags, 0, len(stored), size)
    return _HEADER.pack(_MAGIC, schema, flags, zlib.crc32(stored, zlib.crc32(fields)), len(stored), size)


def _open(blob: memoryview) -> tuple[memoryview, int, int]:
    """Check the header against the bytes that are really there."""
    if len(blob) < _HEADER.size:
        raise TruncatedBlob(f"{len(blob)} bytes are fewer than a header's {_HEADER.size}")
    magic, schema, flags, _, stored_size, size = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        raise MalformedBlob(f"it begins with {magic!r}, not {_MAGIC!r}")
    if schema > SCHEMA:
        raise NewerSchema(f"written with schema {schema}, this Argosy reads up to {SCHEMA}: upgrade it")
    stored = blob[_HEADER.size :]
    if stored_size != len(stored):
        raise TruncatedBlob(f"the header says {stored_size} bytes, there are {len(stored)}")
    if _header(schema, flags, stored, size) != blob[: _HEADER.size]:
        raise CorruptBlob("the checksum does not match")
    if schema < 1 or flags & ~_COMPRESSED or size > MAX_BYTES or (not flags and size != stored_size):
        raise MalformedBlob(f"impossible header: schema {schema}, flags {flags}, {stored_size} of {size} bytes")
    return stored, flags, size


def _decompress(stored: memoryview, size: int) -> bytes:
    try:
        if zstandard.frame_content_size(stored) != size:
            raise MalformedBlob("the compressed frame and the header disagree about the size")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedBlob(f"not a zstd frame: {error}") from error
    if len(raw) != size:
        raise MalformedBlob(f"{len(raw)} bytes came out where {size} were promised")
    return raw


def _to_map(t: Trajectory) -> dict[str, Any]:
    return {
        "id": t.id,
        "attempt": t.attempt,
        "task": [t.task.id, t.task.source, t.task.seed],
        "group": [t.group, t.group_size, t.group_index],
        "env": t.env,
        "status": t.status,
        "reward": float(t.reward),
        "reward_parts": {name: float(value) for name, value in t.reward_parts.items()},
        "traces": [_trace_to_map(trace) for trace in t.traces],
        "timing": {name: float(value) for name, value in t.timing.items()},
        "engine": t.engine,
        "actor": t.actor,
        "sampling": t.sampling,
    }


def _trace_to_map(trace: Trace) -> dict[str, Any]:
    return {
        "tokens": msgpack.ExtType(_INT32, trace.tokens.astype("<i4").tobytes()),
        "sampled": msgpack.ExtType(_BITS, np.packbits(trace.sampled).tobytes()),
        "logprobs": msgpack.ExtType(_FLOAT32, trace.logprobs.astype("<f4").tobytes()),
        "versions": msgpack.ExtType(_RUNS, _to_runs(trace.versions)),
        "rewards": [[int(position), float(value)] for position, value in trace.rewards],
        "turns": [[t.start, t.end, t.role, t.tool, float(t.seconds)] for t in trace.turns],
        "parent": trace.parent,
        "kind": trace.kind,
    }


def _to_runs(values: NDArray[np.int32]) -> bytes:
    """Run-length pairs (value, count): versions change a few times in a trace, not at every token."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    counts = np.diff(starts, append=len(values))
    return np.stack([values[starts], counts], axis=1).astype("<i4").tobytes()


def _column(code: int, data: bytes) -> NDArray[Any]:
    dtype = {_INT32: "<i4", _FLOAT32: "<f4", _BITS: "u1", _RUNS: "<i4"}.get(code)
    if dtype is None:
        raise MalformedBlob(f"unknown column type {code}")
    return np.frombuffer(data, dtype)


def _from_map(content: Any) -> Trajectory:
    fields = _Fields(content, "trajectory")
    task_id, source, seed = fields.items("task", str, str, int)
    group, group_size, group_index = fields.items("group", str, int, int)
    return Trajectory(
        id=fields.take("id", str),
        attempt=fields.take("attempt", str),
        task=Task(task_id, source, seed),
        group=group,
        group_size=group_size,
        group_index=group_index,
        env=fields.take("env", str),
        status=fields.take("status", str),  # type: ignore[arg-type]  # Trajectory checks the value
        reward=fields.take("reward", float),
        reward_parts=_numbers(fields.take("reward_parts", dict)),
        traces=[_trace_from_map(trace) for trace in fields.take("traces", list)],
        timing=_numbers(fields.take("timing", dict)),
        engine=fields.take("engine", str),
        actor=fields.take("actor", str),
        sampling=fields.take("sampling", dict),
    )


def _trace_from_map(content: Any) -> Trace:
    fields = _Fields(content, "trace")
    tokens = fields.take("tokens", np.ndarray)
    sampled = fields.take("sampled", np.ndarray)
    if sampled.dtype != np.uint8 or len(sampled) != (len(tokens) + 7) // 8:
        raise MalformedBlob(f"{len(sampled)} bytes of sampled bits for {len(tokens)} tokens")
    turns = [_checked(turn, "turn", int, int, str, str | None, float) for turn in fields.take("turns", list)]
    return Trace(
        tokens=tokens,
        sampled=np.unpackbits(sampled, count=len(tokens)).view(np.bool_),
        logprobs=fields.take("logprobs", np.ndarray),
        versions=_from_runs(fields.take("versions", np.ndarray), len(tokens)),
        rewards=[_checked(reward, "reward", int, float) for reward in fields.take("rewards", list)],
        turns=[Turn(*turn) for turn in turns],
        parent=fields.take("parent", int | None),  # type: ignore[arg-type]
        kind=fields.take("kind", str),
    )


def _from_runs(runs: NDArray[Any], length: int) -> NDArray[np.int32]:
    if runs.dtype != np.dtype("<i4") or len(runs) % 2:
        raise MalformedBlob("version runs are not pairs")
    values, counts = runs[0::2], runs[1::2].astype(np.int64)
    if (counts <= 0).any() or counts.sum() != length:
        raise MalformedBlob(f"version runs do not add up to {length} tokens")
    return np.repeat(values, counts)


class _Fields:
    """Typed access to a decoded map; a missing or ill-typed field is a MalformedBlob that names it."""

    def __init__(self, content: Any, what: str) -> None:
        self._content, self._what = _typed(content, dict, what), what

    def take(self, name: str, kind: type[T]) -> T:
        if name not in self._content:
            raise MalformedBlob(f"{self._what} without {name}")
        return _typed(self._content[name], kind, name)

    def items(self, name: str, *kinds: Any) -> tuple[Any, ...]:
        return _checked(self.take(name, list), name, *kinds)


def _typed(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedBlob(f"{what} is {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
    return value


def _checked(values: Any, what: str, *kinds: Any) -> tuple[Any, ...]:
    if len(_typed(values, list, what)) != len(kinds):
        raise MalformedBlob(f"{what} has {len(values)} items, not {len(kinds)}")
    return tuple(_typed(value, kind, what) for value, kind in zip(values, kinds))


def _numbers(content: dict[Any, Any]) -> dict[str, float]:
    return {_typed(name, str, "a name"): _typed(value, float, str(name)) for name, value in content.items()}
