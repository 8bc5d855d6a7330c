"""Everything this folder raises on purpose; the tree is the documentation.

BufferError
├── InsecureRedis          a remote Redis without TLS or password, and nobody insisted (also a ValueError)
├── RedisUnavailable       Redis did not serve a call before its deadline, after retries
├── RedisRefused           Redis does not know the user or the password of the url, or TLS trusts no certificate of it
├── UnsafeRedis            Redis would throw keys away when it is full
├── RunTaken               the run's keys in Redis belong to another run of the same name
├── StepCommitted          a learner asked for a step that a durable checkpoint already holds: two learners, one run
├── LearnerReplaced        another learner of the run was started after this one, and has put back what this one trains
├── VersionNotNewer        weights published under a version that is not above the newest one
├── Unreadable             payloads of claimed attempts are missing or corrupt: withdraw them, claim the step again
├── BadOrder               buffer.order names no function, or one that gives no weights (also a ValueError)
├── InvalidTrajectory      a trajectory that contradicts itself (also a ValueError)
└── CodecError             bytes that are not a trajectory
    ├── TruncatedBlob      fewer or more bytes than the header says
    ├── CorruptBlob        the checksum does not match
    ├── MalformedBlob      the checksum matches, and yet the content lies about a size, a type or a value
    └── NewerSchema        written by a newer Argosy: upgrade the reader
"""


class BufferError(Exception):
    """The root of this folder's errors."""


class InsecureRedis(BufferError, ValueError):
    pass


class RedisUnavailable(BufferError):
    pass


class RedisRefused(BufferError):
    pass


class UnsafeRedis(BufferError):
    pass


class RunTaken(BufferError):
    pass


class StepCommitted(BufferError):
    pass


class LearnerReplaced(BufferError):
    pass


class VersionNotNewer(BufferError):
    pass


class Unreadable(BufferError):
    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(f"payloads that cannot be read: {reasons}")
        self.reasons = reasons
        """Attempt -> what is wrong with its payload."""


class BadOrder(BufferError, ValueError):
    pass


class InvalidTrajectory(BufferError, ValueError):
    pass


class CodecError(BufferError):
    pass


class TruncatedBlob(CodecError):
    pass


class CorruptBlob(CodecError):
    pass


class MalformedBlob(CodecError):
    pass


class NewerSchema(CodecError):
    pass
