"""Which weights exist and which engine serves them.

Invariant: versions in the ledger only grow. Redis guarantees it: a version is the id of its stream entry, and a stream
refuses an id that is not above its last.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis

from .connection import Connection
from .errors import VersionNotNewer
from .settings import BufferSettings

KEEP_VERSIONS = 1000
KEEP_CONFIRMATIONS = 100


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights that engines may load: WeightVersion(7, "runs/demo/weights/v7", step=6, checksum="", created=1.7e9)."""

    version: int
    path: str
    step: int
    checksum: str
    created: float


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A live engine: where it is, which version it confirmed to serve, when it was last heard of (by its own clock)."""

    url: str
    version: int
    seen: float


class WeightLedger:
    """Versioned weights and the engines that serve them, beside the run's buffer. Synchronous and thread-safe."""

    def __init__(self, settings: BufferSettings) -> None:
        self._connection = Connection(settings)
        prefix = f"{{{settings.run}}}:weights"
        self._versions = f"{prefix}:versions"  # STREAM, entry <version>-1
        self._confirmations = f"{prefix}:confirmations"  # STREAM, a bell for wait_confirmed
        self._served = f"{prefix}:served"  # HASH engine -> version
        self._names = f"{prefix}:engines"  # SET of every engine ever registered
        self._engine = f"{prefix}:engine:"  # STRING per live engine, expires with its ttl

    def publish(self, weights: WeightVersion) -> None:
        """Announce new weights; publishing the newest again is fine, an older version is refused."""
        record = json.dumps(asdict(weights))
        try:
            self._connection.call(
                "weights.publish",
                lambda r: r.xadd(self._versions, {"record": record}, f"{weights.version}-1", maxlen=KEEP_VERSIONS),
            )
        except redis.ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            newest = self.latest()
            if newest != weights:  # else the answer to our first try was lost
                raise VersionNotNewer(f"version {weights.version} is not above the newest, {newest}") from error

    def latest(self) -> WeightVersion | None:
        entries: Any = self._connection.call("weights.latest", lambda r: r.xrevrange(self._versions, count=1))
        return WeightVersion(**json.loads(entries[0][1][b"record"])) if entries else None

    def wait(self, after: int, timeout: float) -> WeightVersion | None:
        """The newest weights as soon as their version is above `after`; None if none came for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        entry = f"{after}-1" if after >= 0 else "0-0"
        return (
            self.latest() if self._connection.wait_for_entry("weights.wait", self._versions, entry, deadline) else None
        )

    def register_engine(self, engine: str, url: str, ttl: float, version: int | None = None) -> None:
        """Say that an engine serves at `url`; call it again as heartbeat well within `ttl` seconds.

        A (re)started engine passes the version it loaded; a heartbeat leaves it out and keeps what was confirmed.
        """
        record = json.dumps({"url": url, "seen": time.time()})

        def register(r: redis.Redis) -> None:
            with r.pipeline() as pipe:
                pipe.sadd(self._names, engine)
                if version is not None:
                    pipe.hset(self._served, engine, version)
                pipe.set(self._engine + engine, record, px=int(ttl * 1000))
                pipe.execute()

        self._connection.call("weights.register_engine", register)

    def unregister_engine(self, engine: str) -> None:
        def unregister(r: redis.Redis) -> None:
            with r.pipeline() as pipe:
                pipe.delete(self._engine + engine)
                pipe.srem(self._names, engine)
                pipe.hdel(self._served, engine)
                pipe.xadd(self._confirmations, {"engine": engine}, maxlen=KEEP_CONFIRMATIONS)
                pipe.execute()

        self._connection.call("weights.unregister_engine", unregister)

    def engines(self) -> dict[str, EngineRecord]:
        """The live engines; one whose heartbeat stopped is no longer in it."""
        members: Any = self._connection.call("weights.engines", lambda r: r.smembers(self._names))
        names = sorted(name.decode() for name in members)
        if not names:
            return {}
        records = self._connection.call("weights.engines", lambda r: r.mget([self._engine + name for name in names]))
        served = self._connection.call("weights.engines", lambda r: r.hmget(self._served, names))
        return {
            name: EngineRecord(version=int(version or 0), **json.loads(record))
            for name, record, version in zip(names, records, served)
            if record is not None
        }

    def confirm(self, engine: str, version: int) -> None:
        """Say that the engine has been seen to serve `version`."""

        def confirm(r: redis.Redis) -> None:
            with r.pipeline() as pipe:
                pipe.hset(self._served, engine, version)
                pipe.xadd(self._confirmations, {"engine": engine}, maxlen=KEEP_CONFIRMATIONS)
                pipe.execute()

        self._connection.call("weights.confirm", confirm)

    def wait_confirmed(self, version: int, timeout: float) -> list[str]:
        """Wait until every live engine serves at least `version`; returns those that did not in time."""
        deadline = time.monotonic() + timeout
        while True:
            seen = self._connection.last_entry("weights.wait", self._confirmations)
            behind = [name for name, engine in self.engines().items() if engine.version < version]
            if not behind or time.monotonic() >= deadline:
                return behind
            # an engine that dies meanwhile expires silently: look again at least once a second
            soon = min(deadline, time.monotonic() + 1)
            self._connection.wait_for_entry("weights.wait", self._confirmations, seen, soon)

    def close(self) -> None:
        self._connection.close()
