"""A trajectory as bytes: a fixed header, the columns as raw little-endian numbers, then a msgpack map of all else.

Invariant: `unpack` returns a consistent trajectory or raises a `CodecError`, and what it allocates is bounded by the
bytes that are really there. The header's sizes are checked against the real ones before anything is decompressed, the
checksum before anything is parsed, and no count inside is believed beyond the bytes that carry it. `pack` writes
nothing that `unpack` would refuse.

    header  = magic "ARGO" | schema u16 | flags u16 | xxh3_64 u64 | stored u64 | content u64 | columns u64    (bytes)
    content = columns | map
    columns = for each trace: tokens i32 | log-probabilities of the sampled tokens f32 | runs of versions (i32, i32)
              | starts, ends and voices of turns i32 | their seconds f64 | positions of rewards i32 | their values f64

What was sampled is what has a version. Columns lie at multiples of four bytes, so an uncompressed blob is read in
place: the tokens of a trajectory are a view of it. The checksum covers the header's other fields and the stored bytes.
It finds accidents; against forgery there are TLS and passwords.
"""

import struct
from typing import Any, TypeVar

import msgpack
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from .errors import CorruptBlob, InvalidTrajectory, MalformedBlob, NewerSchema, TruncatedBlob
from .memory import Memory
from .trajectory import NOT_SAMPLED, SCHEMA, Task, Trace, Trajectory, Turns

MAX_BYTES = 1 << 30
HEADER_BYTES = 40
# Of the 12 kB of 2,000 tokens zstd saves 5 in 85 us, in and out; a network of 1 Gbit/s carries them twice in as long.
COMPRESS_ABOVE = 1 << 13
MAX_RATIO = 64  # trajectories shrink to a half; what shrinks so much more may be a bomb: neither written nor read
# Of a list: turns and rewards are columns. msgpack makes a list of the length that it is told before it has read the
# items, and lists nest to 1,024: 128 MiB at the worst.
MAX_ITEMS = 1 << 14
_HEADER = struct.Struct("<4sHHQQQQ")
_MAGIC = b"ARGO"
_COMPRESSED = 1
_INT, _FLOAT, _DOUBLE, _WORD, _HALF = map(np.dtype, ("<i4", "<f4", "<f8", "<u4", "<u2"))

T = TypeVar("T")
Buffer = bytes | memoryview


def pack(trajectory: Trajectory, compress: bool = False) -> bytes:
    """The trajectory as bytes; compressing halves them, and takes three times as long.

    Raises InvalidTrajectory if it holds what cannot be written, as a state or sampling of other than JSON's types.
    """
    if trajectory.schema != SCHEMA:
        raise InvalidTrajectory(f"only schema {SCHEMA} can be written, not {trajectory.schema}")
    try:
        traces = [_split(trace) for trace in trajectory.traces]
        columns = [column for _, columns in traces for column in columns]
        rest: bytes = msgpack.packb(_to_map(trajectory, [others for others, _ in traces]))
        _parse(memoryview(rest))
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise InvalidTrajectory(f"{trajectory.id} cannot be written: {error!r}") from error
    columns_size = sum(memoryview(column).nbytes for column in columns)
    size = columns_size + len(rest)
    if size > MAX_BYTES:
        raise InvalidTrajectory(f"{trajectory.id} takes {size} bytes; the limit is {MAX_BYTES}")
    plain = [*columns, rest]
    if compress and size > COMPRESS_ABOVE:
        small = _compress(b"".join(columns), rest)
        if len(small) < size < MAX_RATIO * len(small):
            return _header(SCHEMA, _COMPRESSED, [small], len(small), size, columns_size) + small
    return b"".join([_header(SCHEMA, 0, plain, size, size, columns_size), *plain])


def unpack(blob: Buffer, memory: Memory | None = None) -> Trajectory:
    """The trajectory in these bytes, or a CodecError that says what is wrong with them. Its arrays lie in `memory`."""
    stored, flags, size, columns_size = _open(memoryview(blob))
    if flags & _COMPRESSED:
        columns, rest = _decompress(stored, size, columns_size)
    else:
        columns, rest = np.frombuffer(stored[:columns_size], np.uint8), stored[columns_size:]
    try:
        return _from_map(_parse(rest), _Columns(columns), memory or Memory())
    except MalformedBlob:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedBlob(f"the content is not a trajectory: {error!r}") from error


def check(blob: Buffer) -> None:
    """Raise the CodecError that the header or the checksum deserves; the content is not parsed."""
    _open(memoryview(blob))


def _header(schema: int, flags: int, stored: list[Any], *sizes: int) -> bytes:
    checksum = xxhash.xxh3_64(_HEADER.pack(_MAGIC, schema, flags, 0, *sizes))
    for part in stored:
        checksum.update(part)
    return _HEADER.pack(_MAGIC, schema, flags, checksum.intdigest(), *sizes)


def _open(blob: memoryview) -> tuple[memoryview, int, int, int]:
    """Check the header against the bytes that are really there."""
    if len(blob) < HEADER_BYTES:
        raise TruncatedBlob(f"{len(blob)} bytes are fewer than a header's {HEADER_BYTES}")
    magic, schema, flags, _, stored_size, size, columns_size = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        raise MalformedBlob(f"it begins with {magic!r}, not {_MAGIC!r}")
    if schema > SCHEMA:
        raise NewerSchema(f"written with schema {schema}, this Argosy reads up to {SCHEMA}: upgrade it")
    stored = blob[HEADER_BYTES:]
    if stored_size != len(stored):
        raise TruncatedBlob(f"the header says {stored_size} bytes, there are {len(stored)}")
    if _header(schema, flags, [stored], stored_size, size, columns_size) != blob[:HEADER_BYTES]:
        raise CorruptBlob("the checksum does not match")
    right_size = stored_size < size <= MAX_RATIO * stored_size if flags & _COMPRESSED else size == stored_size
    if schema < 1 or flags & ~_COMPRESSED or not right_size or size > MAX_BYTES or columns_size > size:
        sizes = f"{stored_size} for {size} bytes with {columns_size} of columns"
        raise MalformedBlob(f"impossible header: schema {schema}, flags {flags}, {sizes}")
    return stored, flags, size, columns_size


def _compress(columns: bytes, rest: bytes) -> bytes:
    """First the lower halves of the columns' words, then the upper ones, then the rest, in one zstd frame.

    The upper halves of token ids are nearly all alike: apart from the lower ones' noise they cost next to nothing.
    """
    words = np.frombuffer(columns, _WORD)
    raw = np.empty(len(columns) + len(rest), np.uint8)
    lower, upper = raw[: len(columns)].view(_HALF).reshape(2, -1)
    lower[:] = words & 0xFFFF
    upper[:] = words >> 16
    raw[len(columns) :] = np.frombuffer(rest, np.uint8)
    return zstandard.ZstdCompressor(level=1).compress(raw.data)


def _decompress(stored: memoryview, size: int, columns_size: int) -> tuple[NDArray[Any], memoryview]:
    try:
        if zstandard.frame_content_size(stored) != size:
            raise MalformedBlob("the compressed frame and the header disagree about the size")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedBlob(f"not a zstd frame: {error}") from error
    if len(raw) != size or columns_size % 4:
        raise MalformedBlob(f"{len(raw)} of {size} bytes came out, with {columns_size} bytes of columns")
    lower, upper = np.frombuffer(raw, _HALF, columns_size // 2).reshape(2, -1)
    words = upper.astype(_WORD)
    words <<= 16
    words |= lower
    return words.view(np.uint8), memoryview(raw)[columns_size:]


def _parse(rest: memoryview) -> Any:
    # a string or a map takes no more memory than its bytes; binary data and extensions have no place here
    longest = min(MAX_ITEMS, len(rest))
    return msgpack.unpackb(rest, max_array_len=longest, max_bin_len=0, max_ext_len=0)


def _to_map(t: Trajectory, traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": t.id,
        "attempt": t.attempt,
        "task": [t.task.id, t.task.source, t.task.seed],
        "group": [t.group, t.group_size, t.group_index],
        "env": t.env,
        "status": t.status,
        "reward": float(t.reward),
        "reward_parts": {name: float(value) for name, value in t.reward_parts.items()},
        "traces": traces,
        "timing": {name: float(value) for name, value in t.timing.items()},
        "engine": t.engine,
        "actor": t.actor,
        "sampling": t.sampling,
        "state": t.state,
    }


def _split(trace: Trace) -> tuple[dict[str, Any], list[Any]]:
    """A trace's part of the map, and its columns."""
    logprobs = trace.logprobs[trace.sampled]
    runs = _to_runs(trace.versions)
    starts, ends, roles, tools, seconds = zip(*trace.turns) if trace.turns else ((),) * 5
    said_by = list(zip(roles, tools))
    voices = {voice: number for number, voice in enumerate(dict.fromkeys(said_by))}
    positions, values = zip(*trace.rewards) if trace.rewards else ((), ())
    sizes = [len(trace), len(logprobs), len(runs), len(starts), len(positions)]
    numbers = (*starts, *ends, *map(voices.__getitem__, said_by), *seconds, *positions, *values)
    others = {"sizes": sizes, "voices": list(map(list, voices)), "parent": trace.parent, "kind": trace.kind}
    format_ = f"<{3 * len(starts)}i{len(starts)}d{len(positions)}i{len(positions)}d"
    tokens, logprobs = trace.tokens.astype(_INT, copy=False), logprobs.astype(_FLOAT, copy=False)
    return others, [tokens, logprobs, runs, struct.pack(format_, *numbers)]


def _to_runs(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pairs (value, count): versions change a few times in a trace, not at every token."""
    changes = np.flatnonzero(values[1:] != values[:-1])
    runs = np.empty((len(changes) + 1, 2), _INT)
    runs[:-1, 0], runs[-1, 0] = values[changes], values[-1]
    runs[0, 1] = runs[-1, 1] = len(values)
    if len(changes):
        runs[0, 1] = changes[0] + 1
        runs[1:-1, 1] = changes[1:] - changes[:-1]
        runs[-1, 1] = len(values) - 1 - changes[-1]
    return runs


def _from_map(content: Any, columns: "_Columns", memory: Memory) -> Trajectory:
    fields = _Fields(content, "trajectory")
    task_id, source, seed = fields.items("task", str, str, int)
    group, group_size, group_index = fields.items("group", str, int, int)
    traces = [_join(trace, columns, memory) for trace in fields.take("traces", list)]
    columns.end()
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
        traces=traces,
        timing=_numbers(fields.take("timing", dict)),
        engine=fields.take("engine", str),
        actor=fields.take("actor", str),
        sampling=fields.take("sampling", dict),
        state=fields.take("state", dict),
    )


def _join(others: Any, columns: "_Columns", memory: Memory) -> Trace:
    fields = _Fields(others, "trace")
    n_tokens, n_sampled, n_runs, n_turns, n_rewards = fields.items("sizes", int, int, int, int, int)
    voices = [_checked(voice, "voice", str, str | None) for voice in fields.take("voices", list)]
    tokens, sampled_logprobs = columns.take(_INT, n_tokens), columns.take(_FLOAT, n_sampled)
    versions = _from_runs(columns.take(_INT, 2 * n_runs), n_tokens, memory)
    starts, ends, said_by = (columns.take(_INT, n_turns) for _ in range(3))
    seconds = columns.take(_DOUBLE, n_turns)
    positions, values = columns.take(_INT, n_rewards).tolist(), columns.take(_DOUBLE, n_rewards).tolist()
    sampled = np.greater_equal(versions, 0, out=memory.take(n_tokens, np.bool_))
    if np.count_nonzero(sampled) != n_sampled:
        raise MalformedBlob(f"{n_sampled} log-probabilities for {np.count_nonzero(sampled)} sampled tokens")
    logprobs = memory.take(n_tokens, np.float32)
    logprobs.fill(0)
    logprobs[sampled] = sampled_logprobs
    if np.count_nonzero(np.isfinite(sampled_logprobs)) < n_sampled:
        raise MalformedBlob("a log-probability is not finite")
    if n_turns and said_by.view(np.uint32).max() >= len(voices):
        raise MalformedBlob(f"turns of voices {said_by.min()} to {said_by.max()}; there are {len(voices)}")
    return Trace.of_columns(
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        versions=versions,
        rewards=list(zip(positions, values)),
        turns=Turns(starts, ends, said_by, voices, seconds),
        parent=fields.take("parent", int | None),  # type: ignore[arg-type]
        kind=fields.take("kind", str),
    )


def _from_runs(runs: NDArray[np.int32], length: int, memory: Memory) -> NDArray[np.int32]:
    values, counts = runs[0::2], runs[1::2].astype(np.int64)
    if np.count_nonzero(counts <= 0) or counts.sum() != length:
        raise MalformedBlob(f"version runs do not add up to {length} tokens")
    if np.count_nonzero(values < NOT_SAMPLED):
        raise MalformedBlob(f"a version is below {NOT_SAMPLED}")
    versions = memory.take(length, np.int32)
    versions[:] = np.repeat(values, counts)
    return versions


class _Columns:
    """Hands out the columns in the order they were written."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._left = content

    def take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        size = dtype.itemsize * count
        if not 0 <= size <= len(self._left):
            raise MalformedBlob(f"a column of {count} numbers in the last {len(self._left)} bytes of columns")
        column, self._left = self._left[:size].view(dtype), self._left[size:]
        return column

    def end(self) -> None:
        if len(self._left):
            raise MalformedBlob(f"{len(self._left)} bytes of columns belong to no trace")


class _Fields:
    """Typed access to a decoded map; a missing or ill-typed field is a MalformedBlob that names it."""

    def __init__(self, content: Any, what: str) -> None:
        self._content, self._what = _typed(content, dict, what), what

    def take(self, name: str, kind: type[T]) -> T:
        try:
            value = self._content[name]
        except KeyError:
            raise MalformedBlob(f"{self._what} without {name}") from None
        return value if type(value) is kind else _typed(value, kind, name)

    def items(self, name: str, *kinds: Any) -> tuple[Any, ...]:
        return _checked(self.take(name, list), name, *kinds)


def _typed(value: Any, kind: Any, what: str) -> Any:
    if type(value) is not kind and (not isinstance(value, kind) or isinstance(value, bool)):
        raise MalformedBlob(f"{what} is {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
    return value


def _checked(values: Any, what: str, *kinds: Any) -> tuple[Any, ...]:
    if len(_typed(values, list, what)) != len(kinds):
        raise MalformedBlob(f"{what} has {len(values)} items, not {len(kinds)}")
    return tuple([_typed(value, kind, what) for value, kind in zip(values, kinds)])


def _numbers(content: dict[Any, Any]) -> dict[str, float]:
    return {_typed(name, str, "a name"): _typed(value, float, str(name)) for name, value in content.items()}
