"""A warm pool of sandboxes, shared by the many episodes of one event loop.

Invariant: at most `size` sandboxes live at once, and whoever acquires one finds it clean: `release` resets it before
anybody else can have it, and one that cannot be reset is ended and replaced. What waits: `acquire`, on `release`.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import SandboxGone, SandboxUnavailable
from .bubblewrap import BubblewrapSandbox
from .sandbox import Sandbox
from .spec import DEFAULT_SPEC, Outcome, SandboxSpec

_STARTS = 2  # starts at once: more only make each other slower

_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, SandboxSpec], SandboxPool]]"
_shared = weakref.WeakKeyDictionary()


class SandboxPool:
    """Belongs to the event loop it is first used in. Sandboxes start when they are needed and stay warm."""

    def __init__(self, size: int = 4, spec: SandboxSpec = DEFAULT_SPEC):
        self.size, self.spec = size, spec
        self._free = asyncio.Semaphore(size)
        self._starting = asyncio.Semaphore(_STARTS)
        self._idle: list[Sandbox] = []
        self._started: list[Sandbox] = []
        self._closed = False

    @classmethod
    def shared(cls, size: int = 4, spec: SandboxSpec = DEFAULT_SPEC) -> "SandboxPool":
        """The pool of this size and spec of the running event loop; `close_shared_pools` ends it."""
        pools = _shared.setdefault(asyncio.get_running_loop(), {})
        return pools.setdefault((size, spec), cls(size, spec))

    async def acquire(self, timeout: float = 60.0, fresh: bool = False) -> Sandbox:
        """A clean sandbox, for the caller alone until `release`; `fresh` wants one that nobody had before."""
        try:
            async with asyncio.timeout(timeout):
                await self._free.acquire()
        except TimeoutError:
            raise SandboxUnavailable(
                f"all {self.size} sandboxes of the pool were in use for {timeout:g} s: make the pool larger"
            ) from None
        try:
            return await self._take(fresh)
        except BaseException:
            self._free.release()
            raise

    async def release(self, sandbox: Sandbox) -> None:
        """Give it back, in whatever state it is; the caller may not use it any more."""
        try:
            if sandbox.alive and not self._closed:
                await sandbox.reset()
        except SandboxGone:
            pass  # it says so itself: not alive
        finally:
            if sandbox.alive and not self._closed:
                self._idle.append(sandbox)
            else:
                sandbox.kill()
            self._free.release()

    @asynccontextmanager
    async def sandbox(self, fresh: bool = False) -> AsyncIterator[Sandbox]:
        """`async with pool.sandbox() as sandbox:` acquires and releases."""
        sandbox = await self.acquire(fresh=fresh)
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
        """`Sandbox.run_python` in a clean sandbox.

        Code that brings its sandbox down gets a second chance in a fresh one, in case the machine was to blame; then it
        is judged as crashed. Were it an infrastructure error, code could escape its grade by it.
        """
        for fresh in (False, True):
            try:
                async with self.sandbox(fresh) as sandbox:
                    if not isinstance(sandbox, BubblewrapSandbox):
                        raise ValueError(f"run_python needs the bubblewrap back end, not {self.spec.backend}: use exec")
                    return await sandbox.run_python(source, function, arguments, timeout, files)
            except SandboxGone:
                continue
        return [Outcome(error="Crashed: the code brought down its sandbox")] * len(arguments)

    async def close(self) -> None:
        """End all sandboxes, also those in use, and wait until they are gone."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in self._started))
        self._started.clear()

    async def _take(self, fresh: bool) -> Sandbox:
        if self._closed:
            raise SandboxUnavailable("the sandbox pool is closed")
        while self._idle:
            sandbox = self._idle.pop()
            if fresh:
                sandbox.kill()
            if sandbox.alive:
                return sandbox
        async with self._starting:
            sandbox = await Sandbox.open(self.spec)
        self._started = [*(other for other in self._started if not other.ended), sandbox]
        return sandbox


async def close_shared_pools() -> None:
    """End the shared pools of the running event loop; a process that ran episodes calls it before it ends."""
    pools = _shared.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(pool.close() for pool in pools.values()))
