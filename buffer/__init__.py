"""What passes between actors and learner: trajectories, a durable replay buffer in Redis, and the ledger of weights."""

from .codec import pack, read_archive, unpack, write_archive
from .errors import BufferError, CodecError, InvalidTrajectory, PayloadLost, RedisUnavailable
from .replay import Lease, Ledger, ReplayBuffer
from .settings import BufferSettings
from .trajectory import Task, Trace, Trajectory, Turn
from .weights import EngineRecord, WeightLedger, WeightVersion

__all__ = [
    "BufferError",
    "BufferSettings",
    "CodecError",
    "EngineRecord",
    "InvalidTrajectory",
    "Lease",
    "Ledger",
    "PayloadLost",
    "RedisUnavailable",
    "ReplayBuffer",
    "Task",
    "Trace",
    "Trajectory",
    "Turn",
    "WeightLedger",
    "WeightVersion",
    "pack",
    "read_archive",
    "unpack",
    "write_archive",
]
