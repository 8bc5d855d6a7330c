"""How a run uses its Redis. Both sides must read the same values; the recipe guarantees it."""

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import InsecureRedis


class BufferSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    """Name of the run; all its keys share the hash tag {run}, so several runs may share one Redis."""
    url: str
    """Where Redis is, percent-encoded: unix:///path.sock, redis://host:port, rediss://user:password@host:port (TLS)."""
    batch_size: Annotated[int, Field(ge=1)]
    """Groups in one learner step."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """Rollouts of one task that become claimable together."""
    eta: Annotated[int, Field(ge=0)] = 4
    """Staleness bound: how many policy versions the oldest sampled token may lie behind at claim; 0 is synchronous."""
    lease_seconds: Annotated[float, Field(gt=0)] = 60.0
    """A worker that sends no heartbeat for so long has lost its attempts."""
    max_tries: Annotated[int, Field(ge=1)] = 3
    """An attempt that fails so often is dropped: env_failed if its worker said so, poisoned if the worker vanished."""
    patience_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long one call keeps retrying while Redis is away, loading or full."""
    insecure: bool = False
    """Allow a remote Redis without password and TLS: anyone on that network can read and forge trajectories."""

    @model_validator(mode="after")
    def _refuse_an_open_redis(self) -> "BufferSettings":
        parts = urlsplit(self.url)
        if parts.scheme not in ("unix", "redis", "rediss"):
            raise ValueError(f"url must begin with unix://, redis:// or rediss://, not {parts.scheme}://")
        protected = parts.scheme == "rediss" and parts.password
        if not (self.insecure or protected or parts.scheme == "unix" or _is_loopback(parts.hostname)):
            raise InsecureRedis(
                f"{parts.hostname} is remote, and {parts.scheme}:// without "
                f"{'a password' if parts.scheme == 'rediss' else 'TLS'} lets its network read and forge trajectories: "
                "use rediss://user:password@host:port, or set insecure=true if that network is yours alone"
            )
        return self


def _is_loopback(host: str | None) -> bool:
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:  # a name, not an address: it may resolve to anything
        return False
