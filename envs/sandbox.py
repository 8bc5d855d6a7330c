"""One sandbox: the owner's side of the guest program.

(in progress: signatures are final, bodies follow)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Limits:
    memory: int = 512 * 2**20
    processes: int = 64
    file_size: int = 64 * 2**20
    disk: int = 256 * 2**20
    output: int = 64 * 2**10


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Result:
    """How a command ended. `reason` is None when it ended by itself."""

    exit: int
    output: str
    truncated: bool
    reason: Literal["timeout", "oom", "killed"] | None


@dataclass(frozen=True)
class Outcome:
    """One call of `run_python`: a JSON value, or `error` ("ZeroDivisionError: division by zero")."""

    value: Any = None
    error: str | None = None


class Sandbox:
    @classmethod
    async def open(cls, limits: Limits = DEFAULT_LIMITS) -> "Sandbox":
        raise NotImplementedError

    async def exec(self, command: str, timeout: float = 60.0) -> Result:
        raise NotImplementedError

    async def write(self, path: str, content: str | bytes) -> None:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        raise NotImplementedError

    async def run_python(
        self,
        source: str,
        function: str,
        arguments: Sequence[Sequence[Any]],
        timeout: float = 2.0,
        files: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        raise NotImplementedError

    async def reset(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
