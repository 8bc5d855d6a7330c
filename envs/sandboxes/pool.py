"""A warm pool of sandboxes, shared by the many episodes of one event loop.

Invariant: at most `size` sandboxes live at once (idle ones and taken places together), and whoever acquires one finds
it clean: `release` resets it before anybody else can have it, and one that cannot be reset is ended and replaced. What
waits: `acquire`, on `release`.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import SandboxGone, SandboxUnavailable
from .bubblewrap import BubblewrapSandbox
from .sandbox import Sandbox
from .spec import DEFAULT_SPEC, Outcome, SandboxSpec

_STARTS = 2  # starts at once: more only make each other slower

_log = logging.getLogger(__name__)
_shared: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[int, SandboxSpec], SandboxPool]]"
_shared = weakref.WeakKeyDictionary()


class SandboxPool:
    """Belongs to the event loop it is first used in. Sandboxes start when they are needed, or before (`warm`)."""

    def __init__(self, size: int = 4, spec: SandboxSpec = DEFAULT_SPEC):
        self.size, self.spec = size, spec
        self._places = asyncio.Semaphore(size)
        self._taken = 0  # places, of those in use and of those being added
        self._adding = 0
        self._starting = asyncio.Semaphore(_STARTS)
        self._idle: list[Sandbox] = []
        self._unused: weakref.WeakSet[Sandbox] = weakref.WeakSet()
        self._started: list[Sandbox] = []
        self._ready = 0
        self._fresh_wanted = False
        self._refills: set[asyncio.Task[bool]] = set()
        self._closed = False

    @classmethod
    def shared(cls, size: int = 4, spec: SandboxSpec = DEFAULT_SPEC) -> "SandboxPool":
        """The pool of this size and spec of the running event loop; `close_shared_pools` ends it."""
        pools = _shared.setdefault(asyncio.get_running_loop(), {})
        return pools.setdefault((size, spec), cls(size, spec))

    async def warm(self, count: int | None = None) -> None:
        """Start `count` (None: all), and from now on keep as many waiting, as far as the size allows.

        `acquire` is instant then; in a pool that is asked for `fresh` ones, half of those that wait are.
        """
        self._ready = self.size if count is None else min(count, self.size)
        self._refill()
        while self._refills:
            await asyncio.gather(*self._refills)

    async def acquire(self, timeout: float = 60.0, fresh: bool = False) -> Sandbox:
        """A clean sandbox, for the caller alone until `release`; `fresh` wants one that nobody had before."""
        self._fresh_wanted |= fresh
        try:
            async with asyncio.timeout(timeout):
                await self._take_place()
        except TimeoutError:
            raise SandboxUnavailable(
                f"all {self.size} sandboxes of the pool were in use for {timeout:g} s: make the pool larger"
            ) from None
        try:
            return await self._take(fresh)
        except BaseException:
            self._give_place_back()
            raise
        finally:
            self._refill()

    async def release(self, sandbox: Sandbox) -> None:
        """Give it back, in whatever state it is; the caller may not use it any more."""
        try:
            if self._used_waiting() >= self._used_allowed():
                sandbox.kill()  # a new one takes its place
            if sandbox.alive and not self._closed:
                await sandbox.reset()
        except SandboxGone:
            pass  # it says so itself: not alive
        finally:
            if sandbox.alive and not self._closed:
                self._idle.append(sandbox)
            else:
                sandbox.kill()
            self._give_place_back()
            self._refill()

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
        for task in self._refills:
            task.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        self._idle.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in self._started))
        self._started.clear()

    async def _take_place(self) -> None:
        await self._places.acquire()
        self._taken += 1

    def _give_place_back(self) -> None:
        self._taken -= 1
        self._places.release()

    async def _take(self, fresh: bool) -> Sandbox:
        """An idle one that will do (not one nobody had, if any will do), else a new one."""
        if self._closed:
            raise SandboxUnavailable("the sandbox pool is closed")
        self._idle = [sandbox for sandbox in self._idle if sandbox.alive]
        fitting = [sandbox for sandbox in self._idle if not fresh or sandbox in self._unused]
        if fitting:
            sandbox = min(fitting, key=self._unused.__contains__)
            self._idle.remove(sandbox)
        else:
            while len(self._idle) + self._taken > self.size:
                self._idle.pop().kill()
            sandbox = await self._start()
        self._unused.discard(sandbox)
        return sandbox

    async def _start(self) -> Sandbox:
        async with self._starting:
            sandbox = await Sandbox.open(self.spec)
        self._unused.add(sandbox)
        self._started = [*(other for other in self._started if not other.ended), sandbox]
        return sandbox

    def _used_waiting(self) -> int:
        return sum(sandbox not in self._unused for sandbox in self._idle)

    def _used_allowed(self) -> int:
        """How many may wait that were used before."""
        return self._ready // 2 if self._fresh_wanted and self._ready else self.size

    def _refill(self) -> None:
        """Start what is missing of the ones that should wait, in the background."""
        if self._closed:
            return
        while self._used_waiting() > self._used_allowed():
            sandbox = next(sandbox for sandbox in self._idle if sandbox not in self._unused)
            self._idle.remove(sandbox)
            sandbox.kill()
        in_use = self._taken - self._adding
        for _ in range(min(self._ready, self.size - in_use) - len(self._idle) - len(self._refills)):
            task = asyncio.create_task(self._add())
            self._refills.add(task)
            task.add_done_callback(self._added)

    async def _add(self) -> bool:
        """Whether it went well. A place is taken meanwhile, so that there are never more than `size`."""
        await self._take_place()
        self._adding += 1
        try:
            if len(self._idle) + self._taken <= self.size and len(self._idle) < self._ready and not self._closed:
                self._idle.append(await self._start())
        except SandboxUnavailable as error:
            _log.warning("a sandbox could not be started ahead of need: %s", error)
            return False
        finally:
            self._adding -= 1
            self._give_place_back()
        return True

    def _added(self, task: asyncio.Task[bool]) -> None:
        self._refills.discard(task)
        if not task.cancelled() and task.exception() is None and task.result():
            self._refill()  # others may have been passed over for want of a place


async def close_shared_pools() -> None:
    """End the shared pools of the running event loop; a process that ran episodes calls it before it ends."""
    pools = _shared.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(pool.close() for pool in pools.values()))
