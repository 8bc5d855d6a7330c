"""The replay buffer: what attempts exist, who works on them, and what became of each.

Invariants, kept by life_cycle.lua (one atomic, idempotent step per transition; Redis runs them one at a time):

1. An attempt is in exactly one state, and created = trained + dropped + live at any moment.
2. Only the holder of an attempt's lease token can write to it: a worker that lost its lease is answered "gone".
3. Nothing older than eta policy versions is ever returned by `claim`; at most
   (eta + 1) * batch_size groups are in flight.
4. The manifest of a learner step is made once and repeated to every rank and retry. It dies with `commit`, when a
   durable checkpoint holds its gradient; until then `rewind` can put it back. So each attempt is trained at most once.
5. A version id is never used twice, whatever is rewound.

Payloads never pass through Lua. A finished payload is first SET under a key that carries the lease token, expiring; the
transition that counts it makes it permanent. A crash between the two leaves nothing behind.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from .codec import pack, unpack
from .connection import LONGEST_BLOCK_SECONDS, Connection, decode
from .errors import PayloadLost, StepCommitted
from .settings import BufferSettings
from .trajectory import Task, Trajectory

READ_TOGETHER = 64  # payloads in one MGET


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one attempt until `deadline` (time.monotonic() of this process), longer with a heartbeat."""

    attempt: str
    token: str
    task: Task
    group: str
    group_size: int
    group_index: int
    tries: int
    deadline: float
    partial: bytes | None = None
    """The last checkpoint of an earlier try; `unpack` reads it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every attempt that was ever created is now."""

    created: int
    trained: int
    dropped: dict[str, int]
    live: dict[str, int]
    by_source: dict[str, dict[str, int]]
    """Per task source: created, trained, dropped, live."""

    @property
    def lost(self) -> int:
        return self.created - self.trained - sum(self.dropped.values()) - sum(self.live.values())

    @property
    def balanced(self) -> bool:
        """Nothing is lost, neither in all nor for any source, and the sources add up to the live sets."""
        rows = self.by_source.values()
        each = all(row["created"] == row["trained"] + row["dropped"] + row["live"] for row in rows)
        return self.lost == 0 and each and sum(row["live"] for row in rows) == sum(self.live.values())


class ReplayBuffer:
    """One run's buffer. Synchronous and thread-safe; every call waits for a Redis that is away, up to a deadline.

    `on_restart` is called when Redis came back with another run_id, before anything else reaches it: the learner calls
    `reconcile` there, because a Redis that lost power has forgotten its last second.
    """

    def __init__(self, settings: BufferSettings, on_restart: Callable[[], None] | None = None) -> None:
        raise NotImplementedError

    def put_tasks(self, source: Callable[[int], Task], limit: int) -> int:
        """Create up to `limit` groups of attempts while there is room; returns how many."""
        raise NotImplementedError

    def lease(self, worker: str, n: int) -> list[Lease]:
        raise NotImplementedError

    def heartbeat(self, leases: Iterable[Lease]) -> list[Lease]:
        """Extend the leases; returns those still held, with their new deadline."""
        raise NotImplementedError

    def checkpoint(self, lease: Lease, trajectory: Trajectory) -> bool:
        raise NotImplementedError

    def complete(self, lease: Lease, trajectory: Trajectory) -> Literal["ok", "gone", "duplicate"]:
        raise NotImplementedError

    def fail(self, lease: Lease, reason: str, detail: str = "") -> Literal["requeued", "dropped", "gone"]:
        raise NotImplementedError

    def release(self, lease: Lease) -> None:
        raise NotImplementedError

    def claim(self, step: int) -> list[str] | None:
        raise NotImplementedError

    def get(self, ids: list[str]) -> list[Trajectory]:
        raise NotImplementedError

    def publish(self, version: int, trained_step: int) -> None:
        raise NotImplementedError

    def commit(self, step: int) -> None:
        raise NotImplementedError

    def rewind(self, step: int, recently_trained: list[str]) -> int:
        raise NotImplementedError

    def reconcile(self, manifests: dict[int, list[str]], recently_trained: list[str], version: int) -> None:
        raise NotImplementedError

    def next_version(self, at_least: int = 0) -> int:
        raise NotImplementedError

    def version(self) -> int:
        raise NotImplementedError

    def ledger(self) -> Ledger:
        raise NotImplementedError

    def state(self, attempt: str) -> str | None:
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def wait(self, timeout: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
