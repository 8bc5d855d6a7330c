"""An archive is whole or not there, is read in bounded memory, and says where it is damaged."""

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from argosy.buffer import Archived, CodecError, Task, Trace, Trajectory, pack, read_archive, write_archive
from argosy.buffer.archive import write_blobs
from argosy.buffer.codec import MAX_BYTES
from argosy.buffer.errors import CorruptBlob, MalformedBlob, TruncatedBlob
from hypothesis import given, settings
from hypothesis import strategies as st

TRACE = Trace(
    np.arange(50), np.arange(50) > 9, np.where(np.arange(50) > 9, -0.5, 0), np.where(np.arange(50) > 9, 3, -1)
)
SMALL = Trajectory("t", "3/0", Task("repair/3", "repair", 3), "3", 1, 0, "argosy/repair", "truncated", 0.0, {}, [TRACE])
SEVERAL = [Archived(replace(SMALL, id=f"t{i}"), f"trained:{i}" if i % 2 else "") for i in range(5)]


def blobs(items: list[Archived]) -> Iterator[tuple[bytes, str]]:
    return ((pack(item.trajectory), item.outcome) for item in items)


def frame(blob: bytes, outcome: bytes = b"", size: int | None = None) -> bytes:
    rest = struct.pack("<QH", len(blob) if size is None else size, len(outcome)) + outcome
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest + blob


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some.archive"
    assert write_archive(path, [SMALL] * 3) == 3
    assert list(read_archive(path)) == [Archived(SMALL)] * 3
    assert write_archive(path, [SMALL], outcome="dropped:stale") == 1
    assert list(read_archive(str(path))) == [Archived(SMALL, "dropped:stale")]
    assert write_blobs(path, blobs(SEVERAL)) == 5
    assert list(read_archive(path)) == SEVERAL
    assert write_archive(path, []) == 0
    assert list(read_archive(path)) == []
    assert list(tmp_path.iterdir()) == [path]


def test_the_layout_of_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "some.archive"
    path.write_bytes(zstandard.compress(frame(pack(SMALL), "größer".encode()) + frame(b"")))
    assert list(read_archive(path)) == [Archived(SMALL, "größer")]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*.archive in"):
        list(read_archive(tmp_path))
    for i in (2, 0, 1):
        write_blobs(tmp_path / f"{i:06d}.archive", blobs(SEVERAL[i : i + 1]))
    (tmp_path / ".000003.archive.draft").write_bytes(b"unfinished")
    (tmp_path / "notes.txt").write_text("of somebody")
    assert list(read_archive(tmp_path)) == SEVERAL[:3]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "some.archive"
    write_archive(path, [SMALL])

    def broken() -> Iterator[Trajectory]:
        yield from [SMALL] * 9
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        write_archive(path, broken())
    with pytest.raises(ValueError, match="outcome of 65536 bytes"):
        write_archive(path, [SMALL], outcome="x" * 65536)
    assert list(read_archive(path)) == [Archived(SMALL)]
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_dies_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "some.archive"
    write_archive(path, [SMALL])
    script = f"""
import os
from argosy.buffer import read_archive, write_archive
def dying():
    (archived,) = read_archive({str(path)!r})
    yield from [archived.trajectory] * 99
    os.kill(os.getpid(), 9)
write_archive({str(path)!r}, dying())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -9
    assert list(read_archive(path)) == [Archived(SMALL)]
    assert write_archive(path, [SMALL] * 2) == 2
    assert list(tmp_path.iterdir()) == [path]


def read_all(path: Path) -> tuple[list[Archived], CodecError | None]:
    found = []
    try:
        for archived in read_archive(path):
            found.append(archived)
    except CodecError as error:
        assert f"{path}, trajectory {len(found)}: " in str(error)
        return found, error
    return found, None


@given(st.data())
@settings(max_examples=200)
def test_damage_is_noticed_where_it_is(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is cut off or changed, what is read before the error is what was written."""
    path = tmp_path_factory.getbasetemp() / "damaged.archive"
    level = data.draw(st.sampled_from([1, -100]))  # the latter leaves nearly all of it as it is
    whole = zstandard.compress(
        b"".join(frame(blob, text.encode()) for blob, text in blobs(SEVERAL)) + frame(b""), level
    )
    damaged = bytearray(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole) - 1))])
    if damaged and data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    found, error = read_all(path)
    assert found == SEVERAL[: len(found)]
    assert error is not None or len(found) == len(SEVERAL)


def test_lies_are_refused_at_no_cost(tmp_path: Path) -> None:
    path = tmp_path / "lying.archive"
    good, end = frame(pack(SMALL), b"trained:1"), frame(b"")
    lies: list[tuple[type[CodecError], int, bytes]] = [
        (TruncatedBlob, 0, b""),
        (TruncatedBlob, 1, zstandard.compress(good)),
        (TruncatedBlob, 1, zstandard.compress(good + good[:-1])),
        (TruncatedBlob, 1, zstandard.compress(good + frame(b"ARGO", size=MAX_BYTES))),
        (MalformedBlob, 1, zstandard.compress(good + frame(b"ARGO", size=2**63))),
        (MalformedBlob, 1, zstandard.compress(good + frame(b"ARGO"))),
        (MalformedBlob, 1, zstandard.compress(good + frame(bytes(1 << 20)) + end)),
        (MalformedBlob, 1, zstandard.compress(good + frame(pack(SMALL), b"\xff") + end)),
        (MalformedBlob, 1, zstandard.compress(good + end + good + end)),
        (MalformedBlob, 1, zstandard.compress(good + end) + zstandard.compress(good + end)),
        (CorruptBlob, 1, zstandard.compress(good + good.replace(b"trained:1", b"trained:2") + end)),
        (CorruptBlob, 1, zstandard.compress(good + frame(pack(SMALL)[:-1] + b"x") + end)),
        (MalformedBlob, 0, b"PK\x03\x04 something else"),
    ]
    for kind, before, content in lies:
        path.write_bytes(content)
        tracemalloc.start()
        found, error = read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert type(error) is kind and len(found) == before
        assert peak < 1 << 24


def test_a_large_window_is_not_granted(tmp_path: Path) -> None:
    path = tmp_path / "wide.archive"
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27))
    with path.open("wb") as file, wide.stream_writer(file) as stream:
        stream.write(frame(pack(SMALL)) + frame(b""))
    assert type(read_all(path)[1]) is MalformedBlob


def test_reading_takes_the_memory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "long.archive"
    length = 1 << 15
    noise = np.random.default_rng(0).integers(0, 2**31, length)
    long = replace(SMALL, traces=[Trace(noise, noise < 0, np.zeros(length), np.full(length, -1))])
    write_archive(path, (long for _ in range(200)))
    tracemalloc.start()
    assert sum(archived.trajectory.n_tokens for archived in read_archive(path)) == 200 * length
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(pack(long))
