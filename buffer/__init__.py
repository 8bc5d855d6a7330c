"""What passes between actors and learner: trajectories, a durable replay buffer in Redis, and the ledger of weights."""

from .archive import Archived, read_archive, write_archive
from .codec import pack, unpack
from .errors import BufferError, CodecError, InvalidTrajectory, RedisUnavailable, Unreadable
from .ledger import Balance, Event, Ledger, Story
from .lineage import Lineage
from .replay import Lease, ReplayBuffer
from .selection import Candidate
from .settings import BufferSettings
from .trajectory import Task, Trace, Trajectory, Turn
from .weights import EngineRecord, WeightLedger, WeightVersion

__all__ = [
    "Archived",
    "Balance",
    "BufferError",
    "BufferSettings",
    "Candidate",
    "CodecError",
    "EngineRecord",
    "Event",
    "InvalidTrajectory",
    "Lease",
    "Ledger",
    "Lineage",
    "RedisUnavailable",
    "ReplayBuffer",
    "Story",
    "Task",
    "Trace",
    "Trajectory",
    "Turn",
    "Unreadable",
    "WeightLedger",
    "WeightVersion",
    "pack",
    "read_archive",
    "unpack",
    "write_archive",
]
