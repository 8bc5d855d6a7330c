"""What goes in comes out; what is not a trajectory is refused, whatever it claims to be."""

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from argosy.buffer import CodecError, InvalidTrajectory, Task, Trace, Trajectory, Turn, pack, unpack
from argosy.buffer.codec import COMPRESS_ABOVE, MAX_ITEMS, MAX_RATIO, check
from argosy.buffer.errors import CorruptBlob, MalformedBlob, NewerSchema, TruncatedBlob
from argosy.buffer.memory import Memory
from hypothesis import given, settings
from hypothesis import strategies as st

HEADER = struct.Struct("<4sHHQQQQ")


def blob_of(stored: bytes, columns: int = 0, *, schema: int = 1, flags: int = 0, size: int | None = None) -> bytes:
    """A blob with a right checksum around any content."""
    sizes = (len(stored), len(stored) if size is None else size, columns)
    bare = HEADER.pack(b"ARGO", schema, flags, 0, *sizes)
    return HEADER.pack(b"ARGO", schema, flags, xxhash.xxh3_64_intdigest(bare + stored), *sizes) + stored


def opened(blob: bytes) -> tuple[bytes, dict[str, Any]]:
    """Columns and map of an uncompressed blob."""
    columns = HEADER.unpack_from(blob)[-1]
    content = blob[HEADER.size :]
    return content[:columns], msgpack.unpackb(content[columns:])


def closed(columns: bytes, others: Any) -> bytes:
    return blob_of(columns + msgpack.packb(others), len(columns))


texts = st.text(max_size=9)
numbers = st.floats(-9, 9)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)
json_objects = st.dictionaries(texts, json_values, max_size=4)


@st.composite
def traces(draw: st.DrawFn, index: int = 0) -> Trace:
    length = draw(st.integers(1, 40))
    sampled = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    column = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    floats = st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length)
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    tools = st.none() | st.text(max_size=5)
    return Trace(
        tokens=np.array(draw(column)),
        sampled=sampled,
        logprobs=np.where(sampled, draw(floats), 0),
        versions=np.where(sampled, draw(column), -1),
        rewards=draw(st.lists(st.tuples(st.integers(0, length - 1), numbers), max_size=3)),
        turns=[Turn(*span, draw(roles), draw(tools), draw(numbers)) for span in pairwise(cuts)],
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        kind=draw(st.sampled_from(["main", "compaction"])),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    size = draw(st.integers(1, 8))
    return Trajectory(
        id=draw(texts),
        attempt=draw(texts),
        task=Task(draw(texts), draw(texts), draw(st.integers(-(2**63), 2**63 - 1))),
        group=draw(texts),
        group_size=size,
        group_index=draw(st.integers(0, size - 1)),
        env="argosy/repair",
        status=draw(st.sampled_from(["terminated", "truncated", "segment"])),
        reward=draw(numbers),
        reward_parts=draw(st.dictionaries(texts, numbers, max_size=3)),
        traces=[draw(traces(index)) for index in range(draw(st.integers(1, 3)))],
        timing={"engine": 0.25},
        sampling={"temperature": 1.0, "stop": [1, 2]},
        state=draw(json_objects),
    )


SMALL = Trajectory(
    id="t",
    attempt="3/0",
    task=Task("repair/3", "repair", 3),
    group="3",
    group_size=1,
    group_index=0,
    env="argosy/repair",
    status="terminated",
    reward=1.0,
    reward_parts={"tests": 1.0},
    traces=[
        Trace(
            tokens=np.array([5, 6, 7]),
            sampled=np.array([False, True, True]),
            logprobs=np.array([0, -0.5, -0.25]),
            versions=np.array([-1, 3, 4]),
            rewards=[(2, 1.0)],
            turns=[Turn(1, 3, "assistant", None, 0.5)],
        )
    ],
    timing={"total": 2.0},
    engine="engine-0",
    actor="actor-0",
    sampling={"temperature": 1.0},
    state={"turns": 1},
)


def long_one(length: int = 4096, seed: int = 0) -> Trajectory:
    """One that is worth compressing: tokens as frequent as words, spans sampled by three versions."""
    generator = np.random.default_rng(seed)
    sampled = np.arange(length) // 100 % 5 > 2
    weights = 1 / np.arange(1, 50_001)
    trace = Trace(
        tokens=generator.choice(50_000, length, p=weights / weights.sum()),
        sampled=sampled,
        logprobs=np.where(sampled, -generator.exponential(0.5, length), 0),
        versions=np.where(sampled, 7 + np.arange(length) * 3 // length, -1),
        turns=[Turn(at, at + 100, "assistant" if sampled[at] else "tool") for at in range(0, length - 100, 100)],
    )
    return replace(SMALL, traces=[trace])


# The bytes of SMALL in schema 1. If this test fails, SCHEMA must go up, and the reader must still take these.
GOLDEN = bytes.fromhex(
    "4152474f01000000a37412f1f540b20a6e010000000000006e010000000000004c0000000000000005000000060000000700"
    "0000000000bf000080beffffffff010000000300000001000000040000000100000001000000030000000000000000000000"
    "0000e03f02000000000000000000f03f8ea26964a174a7617474656d7074a3332f30a47461736b93a87265706169722f33a6"
    "72657061697203a567726f757093a1330100a3656e76ad6172676f73792f726570616972a6737461747573aa7465726d696e"
    "61746564a6726577617264cb3ff0000000000000ac7265776172645f706172747381a57465737473cb3ff0000000000000a6"
    "7472616365739184a573697a6573950302030101a6766f696365739192a9617373697374616e74c0a6706172656e74c0a46b"
    "696e64a46d61696ea674696d696e6781a5746f74616ccb4000000000000000a6656e67696e65a8656e67696e652d30a56163"
    "746f72a76163746f722d30a873616d706c696e6781ab74656d7065726174757265cb3ff0000000000000a5737461746581a5"
    "7475726e7301"
)


def test_golden_bytes_of_schema_1() -> None:
    assert pack(SMALL) == GOLDEN
    assert unpack(GOLDEN) == SMALL


def test_the_layout_of_a_compressed_blob_of_schema_1() -> None:
    columns, others = opened(GOLDEN)
    halves = [columns[at : at + 2] for first in (0, 2) for at in range(first, len(columns), 4)]
    raw = b"".join(halves) + msgpack.packb(others)
    stored = zstandard.ZstdCompressor().compress(raw)
    assert unpack(blob_of(stored, len(columns), flags=1, size=len(raw))) == SMALL


@given(trajectories())
def test_round_trip(trajectory: Trajectory) -> None:
    blob = pack(trajectory)
    assert unpack(blob) == trajectory
    assert pack(unpack(blob)) == blob
    check(blob)


def test_an_uncompressed_blob_is_read_in_place() -> None:
    blob = pack(SMALL)
    tokens = unpack(blob).traces[0].tokens
    assert np.shares_memory(tokens, np.frombuffer(blob, np.uint8)) and tokens.flags.aligned


def test_a_batch_is_read_into_one_piece_of_memory() -> None:
    blob, memory = pack(long_one()), Memory(1 << 22)
    first = memory.take(1, np.uint8)
    trace = unpack(memoryview(blob), memory).traces[0]
    last = memory.take(1, np.uint8)
    within = range(first.ctypes.data, last.ctypes.data)
    assert all(x.ctypes.data in within for x in (trace.sampled, trace.logprobs, trace.versions))
    assert unpack(blob, Memory(1)) == unpack(blob) == long_one()  # what does not fit lies elsewhere
    assert len(memory.take(1 << 22, np.uint8)) == 1 << 22


def test_turns_are_read_like_a_list() -> None:
    turns = unpack(pack(long_one())).traces[0].turns
    written = list(long_one().traces[0].turns)
    assert len(turns) == len(written) > 2 and list(turns) == written == turns
    assert [turns[0], turns[-1]] == [written[0], written[-1]] and turns[1:] == written[1:] != turns
    assert all(type(value) is type(same) for value, same in zip(turns[0], written[0]))
    with pytest.raises(IndexError):
        turns[len(turns)]


def test_compressing_when_it_pays() -> None:
    trajectory = long_one()
    plain, small = pack(trajectory), pack(trajectory, compress=True)
    assert len(plain) > COMPRESS_ABOVE and len(small) < 0.7 * len(plain)
    assert unpack(small) == unpack(plain) == trajectory
    assert (trajectory.oldest_version, trajectory.newest_version) == (7, 9)
    assert pack(SMALL, compress=True) == GOLDEN
    (trace,) = trajectory.traces
    noise = np.random.default_rng(0).integers(0, 2**31, len(trace)).astype(np.int32)
    for tokens in (noise, np.zeros(1 << 20)):  # that does not shrink; this shrinks to what could as well be a bomb
        all_noise = Trace(tokens, tokens < 0, 0 * tokens, 0 * tokens - 1)
        odd = replace(trajectory, traces=[all_noise])
        assert pack(odd, compress=True) == pack(odd)
        assert odd.oldest_version is None and odd.newest_version is None


@pytest.mark.parametrize(
    "state",
    [
        {"image": b"png"},
        {"seen": {1, 2}},
        {"big": 2**64},
        {7: "seven"},
        {"text": "\ud800"},
        {"list": [0] * (MAX_ITEMS + 1)},
        {"message": SMALL},
    ],
    ids=lambda state: str(next(iter(state))),
)
def test_what_could_not_be_read_is_not_written(state: dict[str, Any]) -> None:
    with pytest.raises(InvalidTrajectory, match="t cannot be written"):
        pack(replace(SMALL, state=state))


@given(trajectories(), st.data())
def test_any_flipped_byte_is_noticed(trajectory: Trajectory, data: st.DataObject) -> None:
    blob = bytearray(pack(trajectory))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    for read in (unpack, check):
        with pytest.raises(CodecError):
            read(bytes(blob))


@given(trajectories(), st.data())
def test_any_truncation_is_noticed(trajectory: Trajectory, data: st.DataObject) -> None:
    blob = pack(trajectory)
    for read in (unpack, check):
        with pytest.raises(TruncatedBlob):
            read(blob[: data.draw(st.integers(0, len(blob) - 1))])
        with pytest.raises(TruncatedBlob):
            read(blob + b"x")


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(max_examples=300)
def test_garbage_with_a_right_checksum_is_refused(raw: bytes, columns: int) -> None:
    with pytest.raises(CodecError):
        unpack(blob_of(raw, columns))


def read_frugally(blob: bytes) -> Trajectory | None:
    """What unpack makes of it, if anything; whatever that is, it took memory in proportion to the blob."""
    tracemalloc.start()
    try:
        trajectory = unpack(blob)
    except CodecError:
        trajectory = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (1 << 20) + 4 * MAX_RATIO * len(blob)
    if trajectory is not None:
        again = pack(trajectory)
        assert pack(unpack(again)) == again
    return trajectory


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes replaced, inserted, taken out or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        new = draw(st.binary(max_size=8) | st.sampled_from([data[at:end] * 2, *LIES]))
        data = data[:at] + new + data[end:]
    return data


# msgpack's long lists, maps, texts, binaries and extensions; extreme and special numbers
LIES = [kind + b"\xff" * 5 for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")] + [b"\xdc\x40\x00" * 9]
LIES += [struct.pack("<i", number) for number in (-(2**31), -2, -1, 0, 2**31 - 1)]
LIES += [struct.pack("<f", float("nan")), msgpack.packb(float("nan")), msgpack.packb(-1), msgpack.packb(2**64 - 1)]
BASES = [GOLDEN, pack(long_one(512)), pack(long_one(), compress=True)]


@given(st.data())
@settings(max_examples=200)
def test_mutations_with_a_stale_checksum_are_noticed(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(BASES))
    blob = data.draw(mutations(base))
    if blob != base:
        assert read_frugally(blob) is None


@given(st.data())
@settings(max_examples=600)
def test_mutations_with_a_right_checksum_are_refused_or_consistent(data: st.DataObject) -> None:
    """A liar: content and sizes that contradict each other, under a checksum that agrees with them."""
    blob = data.draw(st.sampled_from(BASES))
    flags, size, columns = HEADER.unpack_from(blob)[2], *HEADER.unpack_from(blob)[-2:]
    content = zstandard.decompress(blob[HEADER.size :]) if flags else blob[HEADER.size :]
    content = data.draw(mutations(content))
    stored = zstandard.compress(content) if flags else content
    if flags and data.draw(st.booleans()):
        stored = data.draw(mutations(stored))
    honest = st.just(0)
    lies = honest | honest | st.integers(-9, 9) | st.sampled_from([2**40, 2**63])
    columns += data.draw(lies | st.just(len(content) - size))
    size = len(content) + data.draw(lies)
    read_frugally(blob_of(stored, max(0, columns), flags=flags, size=max(0, size)))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 6), st.binary(max_size=16)) | st.just(msgpack.Timestamp(1))


@given(st.data())
@settings(max_examples=300)
def test_a_field_with_any_other_value_is_refused_or_consistent(data: st.DataObject) -> None:
    """A liar with a right checksum: one field anywhere replaced by something else."""
    columns, others = opened(GOLDEN)
    target: Any = data.draw(st.sampled_from([others, others["traces"][0]]))
    field = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        target[field] = data.draw(JUNK | EXTENSIONS)
    else:
        del target[field]
    read_frugally(closed(columns, others))


@given(st.data())
@settings(max_examples=300)
def test_a_column_with_any_other_number_is_refused_or_consistent(data: st.DataObject) -> None:
    columns, others = opened(GOLDEN)
    words = np.frombuffer(columns, np.int32).copy()
    words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.integers(-4, 4) | st.integers(-(2**31), 2**31 - 1))
    sizes = others["traces"][0]["sizes"]
    sizes[data.draw(st.integers(0, 4))] += data.draw(st.integers(-2, 2))
    read_frugally(closed(words.tobytes(), others))


def test_lying_headers() -> None:
    raw, known = GOLDEN[HEADER.size :], HEADER.unpack_from(GOLDEN)[-1]
    with pytest.raises(NewerSchema, match="upgrade"):
        unpack(blob_of(raw, known, schema=2))
    for lie in ({"size": len(raw) + 1}, {"flags": 1, "size": 1 << 40}, {"schema": 0}, {"flags": 2}):
        with pytest.raises(MalformedBlob, match="impossible header"):
            unpack(blob_of(raw, known, **lie))
    with pytest.raises(MalformedBlob, match="impossible header"):
        unpack(blob_of(raw, len(raw) + 1))
    with pytest.raises(MalformedBlob, match="zstd"):
        unpack(blob_of(raw, known, flags=1, size=len(raw) * 2))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(MalformedBlob, match="disagree"):
        unpack(blob_of(bomb, flags=1, size=len(bomb) * 2))
    with pytest.raises(MalformedBlob, match="impossible header"):
        unpack(blob_of(bomb, flags=1, size=1 << 24))
    with pytest.raises(CorruptBlob):
        unpack(GOLDEN[:-1] + b"\xff")
    with pytest.raises(MalformedBlob, match="begins with"):
        unpack(b"PK\x03\x04" + GOLDEN[4:])
    check(blob_of(b"not a trajectory"))


LIARS: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("do not add up", lambda words, trace: words.__setitem__(6, 2**31 - 1)),
    ("do not add up", lambda words, trace: words.__setitem__(6, -1)),
    ("negative", lambda words, trace: words.__setitem__(0, -5)),
    ("2 log-probabilities for 3 sampled tokens", lambda words, trace: words.__setitem__(5, 7)),
    ("voices", lambda words, trace: trace.update(voices=[])),
    ("a column of", lambda words, trace: trace.update(sizes=[2**60, 2, 3, 1, 1])),
    ("a column of", lambda words, trace: trace.update(sizes=[-3, 2, 3, 1, 1])),
    ("belong to no trace", lambda words, trace: trace.update(sizes=[3, 2, 3, 1, 0])),
]


@pytest.mark.parametrize(("complaint", "lie"), LIARS)
def test_counts_inside_are_not_believed(complaint: str, lie: Callable[[Any, Any], Any]) -> None:
    columns, others = opened(GOLDEN)
    words = np.frombuffer(columns, np.int32).copy()
    lie(words, others["traces"][0])
    with pytest.raises(MalformedBlob, match=complaint):
        unpack(closed(words.tobytes(), others))


def test_lists_cost_no_more_than_their_limit() -> None:
    with pytest.raises(MalformedBlob):
        unpack(blob_of(b"\xdd\xff\xff\xff\xff"))  # a list of 2**32 - 1 items in 5 bytes
    nested = b"\xdc\x3f\xff" * 1024 + bytes(MAX_ITEMS)
    tracemalloc.start()
    with pytest.raises(MalformedBlob):
        unpack(blob_of(nested))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * 8 * 1024 * MAX_ITEMS


def test_a_trajectory_that_contradicts_itself_cannot_be_made() -> None:
    good: dict[str, Any] = {"tokens": [1, 2], "sampled": [False, True], "logprobs": [0, -1], "versions": [-1, 3]}
    Trace(**good)
    contradictions: list[dict[str, Any]] = [
        {"tokens": [1]},
        {"tokens": [1, -2]},
        {"tokens": [], "sampled": [], "logprobs": [], "versions": []},
        {"versions": [3, 3]},
        {"versions": [-2, 3]},
        {"logprobs": [-1, -1]},
        {"logprobs": [0, float("nan")]},
        {"rewards": [(2, 1.0)]},
        {"rewards": [(1, float("inf"))]},
        {"turns": [Turn(0, 3, "user")]},
        {"turns": [Turn(0, 2, "user"), Turn(1, 2, "user")]},
    ]
    for bad in contradictions:
        with pytest.raises(InvalidTrajectory):
            Trace(**(good | bad))
