"""What goes in comes out; what is not a trajectory is refused, whatever it claims to be."""

import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from argosy.buffer import (
    CodecError,
    InvalidTrajectory,
    Task,
    Trace,
    Trajectory,
    Turn,
    pack,
    read_archive,
    unpack,
    write_archive,
)
from argosy.buffer.codec import COMPRESS_ABOVE
from argosy.buffer.errors import CorruptBlob, MalformedBlob, NewerSchema, TruncatedBlob
from hypothesis import given, settings
from hypothesis import strategies as st

HEADER = struct.Struct("<4sHHIQQ")


def blob_of(raw: bytes, schema: int = 1, flags: int = 0, size: int | None = None) -> bytes:
    """A blob with a right checksum around any content."""
    fields = (len(raw), len(raw) if size is None else size)
    bare = HEADER.pack(b"ARGO", schema, flags, 0, *fields)
    return HEADER.pack(b"ARGO", schema, flags, zlib.crc32(raw, zlib.crc32(bare)), *fields) + raw


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    length = draw(st.integers(1, 40))
    sampled = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    column = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    floats = st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length)
    cut = draw(st.integers(0, length))
    return Trace(
        tokens=np.array(draw(column)),
        sampled=sampled,
        logprobs=np.where(sampled, draw(floats), 0),
        versions=np.where(sampled, draw(column), -1),
        rewards=draw(st.lists(st.tuples(st.integers(0, length - 1), st.floats(-9, 9)), max_size=3)),
        turns=[Turn(0, cut, "user"), Turn(cut, length, "tool", draw(st.none() | st.text(max_size=5)), 0.5)],
        parent=None,
        kind=draw(st.sampled_from(["main", "compaction"])),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    size = draw(st.integers(1, 8))
    return Trajectory(
        id=draw(st.text(max_size=9)),
        attempt=draw(st.text(max_size=9)),
        task=Task(draw(st.text(max_size=9)), draw(st.text(max_size=9)), draw(st.integers(-(2**63), 2**63 - 1))),
        group=draw(st.text(max_size=9)),
        group_size=size,
        group_index=draw(st.integers(0, size - 1)),
        env="argosy/repair",
        status=draw(st.sampled_from(["terminated", "truncated", "segment"])),
        reward=draw(st.floats(-9, 9)),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-9, 9), max_size=3)),
        traces=draw(st.lists(traces(), min_size=1, max_size=3)),
        timing={"engine": 0.25},
        sampling={"temperature": 1.0, "stop": [1, 2]},
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
)

# The bytes of SMALL in schema 1. If this test fails, SCHEMA must go up, and the reader must still take these.
GOLDEN = bytes.fromhex(
    "4152474f010000002362443b830100000000000083010000000000008da26964a174a7617474656d7074a3332f30a4746173"
    "6b93a87265706169722f33a672657061697203a567726f757093a1330100a3656e76ad6172676f73792f726570616972a673"
    "7461747573aa7465726d696e61746564a6726577617264cb3ff0000000000000ac7265776172645f706172747381a5746573"
    "7473cb3ff0000000000000a67472616365739188a6746f6b656e73c70c01050000000600000007000000a773616d706c6564"
    "d40360a86c6f6770726f6273c70c0200000000000000bf000080bea876657273696f6e73c71804ffffffff01000000030000"
    "00010000000400000001000000a772657761726473919202cb3ff0000000000000a57475726e7391950103a9617373697374"
    "616e74c0cb3fe0000000000000a6706172656e74c0a46b696e64a46d61696ea674696d696e6781a5746f74616ccb40000000"
    "00000000a6656e67696e65a8656e67696e652d30a56163746f72a76163746f722d30a873616d706c696e6781ab74656d7065"
    "726174757265cb3ff0000000000000"
)


def test_golden_bytes_of_schema_1() -> None:
    assert pack(SMALL) == GOLDEN
    assert unpack(GOLDEN) == SMALL


@given(trajectories())
def test_round_trip(trajectory: Trajectory) -> None:
    assert unpack(pack(trajectory)) == trajectory


def test_round_trip_of_a_compressed_one() -> None:
    length = COMPRESS_ABOVE // 4
    ones = np.ones(length, np.int32)
    trace = Trace(np.arange(length) % 50_000, ones > 0, -0.5 * ones, ones // (1 + (np.arange(length) > 99)))
    trajectory = Trajectory("t", "3/0", SMALL.task, "3", 1, 0, "e", "truncated", 0.0, {}, [trace])
    blob = pack(trajectory)
    assert len(blob) < COMPRESS_ABOVE
    assert unpack(blob) == trajectory
    assert trajectory.oldest_version == 0


@given(trajectories(), st.data())
def test_any_flipped_byte_is_noticed(trajectory: Trajectory, data: st.DataObject) -> None:
    blob = bytearray(pack(trajectory))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError):
        unpack(bytes(blob))


@given(trajectories(), st.data())
def test_any_truncation_is_noticed(trajectory: Trajectory, data: st.DataObject) -> None:
    blob = pack(trajectory)
    with pytest.raises(TruncatedBlob):
        unpack(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(TruncatedBlob):
        unpack(blob + b"x")


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_garbage_with_a_right_checksum_is_refused(raw: bytes) -> None:
    with pytest.raises(CodecError):
        unpack(blob_of(raw))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.data())
@settings(max_examples=300)
def test_a_field_with_any_other_value_is_refused_or_consistent(data: st.DataObject) -> None:
    """A liar with a right checksum: one field anywhere replaced by something else."""
    content = msgpack.unpackb(GOLDEN[HEADER.size :])
    target: Any = data.draw(st.sampled_from([content, content["traces"][0]]))
    field = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        target[field] = data.draw(JUNK | st.builds(msgpack.ExtType, st.integers(0, 6), st.binary(max_size=16)))
    else:
        del target[field]
    try:
        trajectory = unpack(blob_of(msgpack.packb(content)))
    except CodecError:
        return
    assert unpack(pack(trajectory)) == trajectory


def test_lying_headers() -> None:
    raw = GOLDEN[HEADER.size :]
    with pytest.raises(NewerSchema, match="upgrade"):
        unpack(blob_of(raw, schema=2))
    with pytest.raises(MalformedBlob, match="impossible header"):
        unpack(blob_of(raw, size=len(raw) + 1))
    with pytest.raises(MalformedBlob, match="impossible header"):
        unpack(blob_of(raw, flags=1, size=1 << 40))
    with pytest.raises(MalformedBlob, match="impossible header"):
        unpack(blob_of(raw, schema=0))
    with pytest.raises(MalformedBlob, match="zstd"):
        unpack(blob_of(raw, flags=1, size=1 << 20))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(MalformedBlob, match="disagree"):
        unpack(blob_of(bomb, flags=1, size=1 << 10))
    with pytest.raises(CorruptBlob):
        unpack(GOLDEN[:-1] + b"\xff")
    with pytest.raises(MalformedBlob, match="begins with"):
        unpack(b"PK\x03\x04" + GOLDEN[4:])


def test_counts_inside_are_not_believed() -> None:
    content = msgpack.unpackb(GOLDEN[HEADER.size :])
    content["traces"][0]["versions"] = msgpack.ExtType(4, struct.pack("<2i", 3, 2**31 - 1))
    with pytest.raises(MalformedBlob, match="do not add up"):
        unpack(blob_of(msgpack.packb(content)))
    with pytest.raises(MalformedBlob):
        unpack(blob_of(b"\xdd\xff\xff\xff\xff"))  # a list of 2**32 - 1 items in 5 bytes


def test_archive(tmp_path: Path) -> None:
    path = tmp_path / "some.argosy"
    assert write_archive(path, [SMALL, SMALL, SMALL]) == 3
    assert list(read_archive(path)) == [SMALL] * 3
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedBlob):
        list(read_archive(path))
    path.write_bytes(struct.pack("<Q", 2**63) + b"x")
    with pytest.raises(TruncatedBlob):
        list(read_archive(path))


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
