"""Trajectories in a compressed file, each with what became of it; for demonstrations, audits and offline training.

Invariant: a file under its name is whole, whoever dies while it is written, so its readers need no lock. A reader takes
a bounded amount of memory, whatever the file claims: no length is believed before it is checked, and no more is
decompressed than what was asked for.

    file  = one zstd stream of frames, the last one with a blob of no bytes
    frame = xxh3_64 of lengths and outcome u64 | length of the blob u64 | of the outcome u16 | outcome | blob of `pack`
"""

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
import zstandard

from .codec import HEADER_BYTES, MAX_BYTES, pack, unpack
from .errors import CodecError, CorruptBlob, MalformedBlob, TruncatedBlob
from .trajectory import Trajectory

SUFFIX = ".archive"
_CHECKSUM = struct.Struct("<Q")
_LENGTHS = struct.Struct("<QH")
_MAX_WINDOW = 1 << 23  # bytes that the decompressor keeps; zstd-1 writes streams of 1 << 19
_SLICE = 1 << 22  # a length that lies costs no more than this beyond the bytes that are there


@dataclass(frozen=True, slots=True)
class Archived:
    """A trajectory and what became of it in a buffer: "trained:41", "dropped:stale", "" if it never was in one."""

    trajectory: Trajectory
    outcome: str = ""


def write_archive(path: Path | str, trajectories: Iterable[Trajectory], outcome: str = "") -> int:
    """Write trajectories of one outcome to a file, in place of what it held; returns how many."""
    return write_blobs(path, ((pack(trajectory), outcome) for trajectory in trajectories))


def write_blobs(path: Path | str, blobs: Iterable[tuple[bytes, str]]) -> int:
    """Write what `pack` made and the caller has checked, each with its outcome; returns how many.

    The file appears, or replaces an older one, when all of it is on the disk.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.draft")
    count = 0
    try:
        with draft.open("wb") as file:
            with zstandard.ZstdCompressor(level=1).stream_writer(file, closefd=False) as stream:
                for blob, outcome in blobs:
                    stream.write(_head(len(blob), outcome))
                    stream.write(blob)
                    count += 1
                stream.write(_head(0, ""))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _sync(path.parent)
    return count


def read_archive(path: Path | str) -> Iterator[Archived]:
    """Read an archive, or a folder's archives in the order of their names, one trajectory at a time.

    Raises a CodecError that names the file and the trajectory.
    """
    path = Path(path)
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no *{SUFFIX} in {path}")
    for file in files:
        yield from _read(file)


def _read(path: Path) -> Iterator[Archived]:
    count = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    with path.open("rb") as file, decompressor.stream_reader(file, read_across_frames=True) as stream:
        while True:
            try:
                archived = _next(stream)
            except zstandard.ZstdError as error:
                raise MalformedBlob(f"{path}, trajectory {count}: {error}") from error
            except CodecError as error:
                raise type(error)(f"{path}, trajectory {count}: {error}") from error
            if archived is None:
                return
            yield archived
            count += 1


def _next(stream: zstandard.ZstdDecompressionReader) -> Archived | None:
    """The next frame's trajectory, or None at the frame that ends the file."""
    head = _take(stream, _CHECKSUM.size + _LENGTHS.size)
    size, outcome_size = _LENGTHS.unpack_from(head, _CHECKSUM.size)
    outcome = _take(stream, outcome_size)
    if _CHECKSUM.pack(_checksum(head[_CHECKSUM.size :] + outcome)) != head[: _CHECKSUM.size]:
        raise CorruptBlob("the checksum of its lengths does not match")
    if size == 0:
        if stream.read(1):
            raise MalformedBlob("the file goes on after its end")
        return None
    if not HEADER_BYTES <= size <= HEADER_BYTES + MAX_BYTES:
        raise MalformedBlob(f"a trajectory of {size} bytes")
    trajectory = unpack(_take(stream, size))
    try:
        return Archived(trajectory, outcome.decode())
    except UnicodeDecodeError as error:
        raise MalformedBlob(f"its outcome is not a text: {error}") from error


def _take(stream: zstandard.ZstdDecompressionReader, size: int) -> bytes:
    parts = []
    while size:
        part = stream.read(min(size, _SLICE))
        if not part:  # zstd takes the end of a truncated stream for its end
            raise TruncatedBlob("the file ends before it does")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _head(size: int, outcome: str) -> bytes:
    text = outcome.encode()
    if len(text) >= 1 << 16:
        raise ValueError(f"an outcome of {len(text)} bytes")
    rest = _LENGTHS.pack(size, len(text)) + text
    return _CHECKSUM.pack(_checksum(rest)) + rest


def _checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _sync(folder: Path) -> None:
    """Make the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
