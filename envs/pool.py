"""A warm pool of sandboxes, shared by the many episodes of one event loop.

(in progress: signatures are final, bodies follow)
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from .sandbox import DEFAULT_LIMITS, Limits, Outcome, Sandbox


class SandboxPool:
    def __init__(self, size: int = 4, limits: Limits = DEFAULT_LIMITS):
        self.size, self.limits = size, limits

    @classmethod
    def shared(cls, size: int = 4, limits: Limits = DEFAULT_LIMITS) -> "SandboxPool":
        """The pool of the running event loop; made at first use, closed by `close_shared_pools`."""
        raise NotImplementedError

    async def acquire(self, timeout: float = 60.0) -> Sandbox:
        raise NotImplementedError

    async def release(self, sandbox: Sandbox) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """`async with pool.sandbox() as sandbox:` acquire and release in one."""
        sandbox = await self.acquire()
        try:
            yield sandbox
        finally:
            await self.release(sandbox)

    async def run_python(
        self,
        source: str,
        function: str,
        arguments: Sequence[Sequence[Any]],
        timeout: float = 2.0,
        files: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """One call in a clean sandbox; code that brings its sandbox down (twice) is judged as crashed."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


async def close_shared_pools() -> None:
    """Close the shared pools of the running event loop; a process that ran episodes calls it before it ends."""
