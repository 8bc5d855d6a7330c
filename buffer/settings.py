"""How a run uses its Redis. Both sides must read the same values; the recipe guarantees it."""

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .errors import InsecureRedis

UNVERIFIED = ("ssl_cert_reqs", "ssl_check_hostname")  # of a url: what redis-py checks unless these say otherwise


class BufferSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    """Name of the run; all its keys share the hash tag {run}, so several runs may share one Redis."""
    url: str
    """Where Redis is, percent-encoded: unix:///path.sock, redis://host:port, rediss://user:password@host:port (TLS)."""
    batch_size: Annotated[int, Field(ge=1, le=4096)]
    """Groups in one learner step."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts of one task that become claimable together."""
    group_failures: Literal["pad", "replace"] = "pad"
    """What becomes of a group that lost members: pad repeats its valid ones if they are more than half, else the group
    is dropped (GLM-5, arXiv 2602.15763); replace runs another attempt for each, up to the group's size in all."""
    eta: Annotated[int, Field(ge=0)] = 4
    """Staleness bound: how many policy versions the oldest sampled token may lie behind at claim; 0 is synchronous."""
    too_old: Literal["finish", "cancel"] = "finish"
    """What becomes of an episode whose first tokens are beyond the bound while it runs: finish lets it end and then
    drops it (stale); cancel stops it at its next heartbeat (cancelled), which saves engine time."""
    order: str = "oldest"
    """Which trajectories are claimed first: oldest, freshest, or by weights from your function, "package.module:name",
    that takes a Candidate and returns how likely it is to be taken in proportion to the others; 0 is never."""
    max_uses: Annotated[int, Field(ge=1)] = 1
    """In how many learner steps a trajectory may be trained on before it is too old."""
    lease_seconds: Annotated[float, Field(gt=0)] = 60.0
    """A worker that sends no heartbeat for so long has lost its attempts."""
    max_tries: Annotated[int, Field(ge=1)] = 3
    """An attempt is dropped when its environment failed so often (env_failed), or when so many workers or learners died
    over it (poisoned)."""
    patience_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long one call keeps retrying while Redis is away, loading or full."""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory that a Redis of the run's own may take (its maxmemory); when it is full actors wait. 0: no limit."""
    compress: Literal["auto", "always", "never"] = "auto"
    """Whether payloads are compressed (zstd): auto does so on the way to another machine, where the network is slower
    than the compression; always also halves the memory of a local Redis, at the cost of time."""
    archive: bool = False
    """Keep trained and dropped trajectories in compressed files of the run's folder, for audit and offline training."""
    insecure: bool = False
    """Allow a remote Redis without password and TLS: anyone on that network can read and forge trajectories."""

    @field_validator("order")
    @classmethod
    def _known_order(cls, order: str) -> str:
        if order not in ("oldest", "freshest") and not re.fullmatch(r"[\w.]+:\w+", order):
            raise ValueError("must be oldest, freshest, or a function as package.module:function")
        return order

    @property
    def is_local(self) -> bool:
        """Whether Redis is on this machine."""
        parts = urlsplit(self.url)
        return parts.scheme == "unix" or _is_loopback(parts.hostname)

    @property
    def compresses(self) -> bool:
        return self.compress == "always" or (self.compress == "auto" and not self.is_local)

    @model_validator(mode="after")
    def _refuse_an_open_redis(self) -> "BufferSettings":
        parts = urlsplit(self.url)
        if parts.scheme not in ("unix", "redis", "rediss"):
            raise ValueError(f"url must begin with unix://, redis:// or rediss://, not {parts.scheme}://")
        unverified = any(name in UNVERIFIED for name, _ in parse_qsl(parts.query))
        protected = parts.scheme == "rediss" and parts.password and not unverified
        if not (self.insecure or protected or self.is_local):
            raise InsecureRedis(
                f"{parts.hostname} is remote, and {parts.scheme}:// without {_missing(parts.scheme, unverified)} lets "
                "its network read and forge trajectories: use rediss://user:password@host:port, or set insecure=true "
                "if that network is yours alone"
            )
        return self


def _missing(scheme: str, unverified: bool) -> str:
    if scheme != "rediss":
        return "TLS"
    return "a check of its certificate" if unverified else "a password"


def _is_loopback(host: str | None) -> bool:
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:  # a name, not an address: it may resolve to anything
        return False
