"""A sandbox in a container of Docker: for tasks that come with an image.

Invariant: a container has no network, no capabilities and no way to gain any, bounded memory (no swap), processes and
shared memory; `docker_shell` keeps deadlines. What an agent can break is its own: the container's first process belongs
to a user that the agent is not, so that it survives whatever the agent kills, and a container that is broken beyond
that is started anew with its files. Nothing waits for a container or an engine that is gone: streams end, calls time
out.

The engine limits the disk only on a file system with quotas (xfs); elsewhere the size of files is limited, and of
/dev/shm, and of all there is to write with `read_only`. Images need /bin/sh, mkdir, mkfifo, rm, cat, sleep and tar.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from ..errors import SandboxGone, SandboxUnavailable
from . import containers, docker_images
from .docker_engine import NoProcess, Stream, address, call, engine, is_trouble, unavailable
from .docker_files import Files
from .docker_shell import KEEPER, WARDEN, Ended, Shell, ShellRefused, Warden
from .network import VARIABLES, Proxy
from .reaper import reap_sometimes
from .sandbox import Sandbox
from .spec import DEFAULT_SPEC, Result, SandboxSpec

log = logging.getLogger(__name__)
_STARTS = 4  # at once: more only make each other slower
_START = 60.0
_KILLED = 137
_FILE_CALL = 60.0  # seconds for one
_NULL = "bash: the command contains a null byte\n"

_starting: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = weakref.WeakKeyDictionary()


class DockerSandbox(Sandbox):
    def __init__(self, spec: SandboxSpec, image: str, user: str):
        self.spec = spec
        self._image, self._user = image, user
        self._container, self._expires = "", 0.0
        self._shell: Shell | None = None
        self._warden: Warden | None = None
        self.proxy = Proxy(spec.network) if spec.network else None
        self._files = Files(spec, self._run)
        self._turn = asyncio.Lock()
        self._alive = self._ended = False

    @classmethod
    async def open(cls, spec: SandboxSpec = DEFAULT_SPEC) -> "DockerSandbox":
        reap_sometimes()
        try:
            image = await call(docker_images.find_or_make, spec.image)
            user = spec.user or (await call(engine().inspect_image, image))["Config"].get("User") or "0"
        except Exception as error:
            if isinstance(error, SandboxUnavailable) or not is_trouble(error):
                raise
            raise unavailable(error, f"image {spec.image} cannot be had") from error
        sandbox = cls(spec, image, user)
        await sandbox._start()
        return sandbox

    async def exec(self, command: str, timeout: float = 60.0, fresh: bool = False) -> Result:
        if "\0" in command:
            return Result(2, _NULL)
        async with self._using():
            if fresh:
                self._leave_shell()
            for _ in range(2):  # what an earlier command left in the background may have ended the shell
                self._shell = self._shell or await self._open_shell()
                ended = await self._shell.run(command, timeout, self.spec.limits.output, self._kill_processes)
                if ended.how != "unstarted":
                    break
                self._leave_shell()
            return await self._result(ended)

    async def _result(self, ended: Ended) -> Result:
        """And the processes and the shell as they have to be after a command that ended like this."""
        reason: Literal["timeout", "oom", "killed"] | None = None
        if ended.how == "late":
            reason = "timeout"
        elif ended.how in ("lost", "unstarted"):
            before = self._shell.ooms if self._shell else 0
            await self._kill_processes(all_may_be_dead=True)
            self._shell = await self._open_shell()
            reason = "oom" if self._shell.ooms > before else "killed"
        elif ended.ooms > 0:
            reason = "oom"
            await self._kill_processes()
        elif ended.how == "exit":
            reason = "killed" if ended.status == _KILLED else None
            self._leave_shell()
        status = _KILLED if reason else ended.status
        return Result(status, ended.output.decode(errors="replace"), ended.truncated, reason)

    async def write(self, path: str, content: str | bytes, executable: bool = False) -> None:
        async with self._using():
            await self._files.write(path, content, executable)

    async def read(self, path: str) -> bytes:
        async with self._using():
            return await self._files.read(path)

    async def snapshot(self, paths: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> bytes:
        async with self._using():
            return await self._files.snapshot(paths, exclude)

    async def restore(self, tar: bytes) -> None:
        async with self._using():
            await self._files.restore(tar)

    async def reset(self) -> None:
        """A new container in place of the old one."""
        async with self._using():
            self._let_go()
            await call(containers.remove, self._container)
            await self._start()

    async def close(self) -> None:
        self._alive = False
        self._let_go()
        if not self._ended and self._container:
            self._ended = True
            await call(_remove_or_log, self._container)

    def kill(self) -> None:
        self._alive = False
        self._let_go()
        if not self._ended and self._container:
            self._ended = True
            _discard(self._container)

    @property
    def alive(self) -> bool:
        return self._alive and time.time() < self._expires

    @property
    def ended(self) -> bool:
        return self._ended

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        """One call at a time; one that does not end properly leaves the sandbox dead."""
        async with self._turn:
            if not self._alive:
                raise SandboxGone("the sandbox is closed")
            try:
                yield
            except Exception as error:
                if not is_trouble(error):  # what the caller asked for cannot be done
                    raise
                fate = await self._fate()
                self.kill()
                raise SandboxGone(f"{fate} ({type(error).__name__}: {error})") from error
            except BaseException:
                self.kill()  # cancelled half-way: the next answer would be the wrong one
                raise

    async def _fate(self) -> str:
        """What became of the container, for whoever reads the error."""
        try:
            async with asyncio.timeout(10):
                state = (await call(engine().inspect_container, self._container))["State"]
        except Exception as error:
            return f"the sandbox's container {self._container[:12]} is gone, or Docker at {address()}: {error}"
        died = f"exit {state['ExitCode']}{', out of memory' if state['OOMKilled'] else ''} {state['Error']}".strip()
        how = "is there, but does not do its work" if state["Running"] else f"ended: {died}"
        return f"the sandbox's container {self._container[:12]} {how}"

    # The container's life.

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        async with _starting.setdefault(loop, asyncio.Semaphore(_STARTS)):
            creating = asyncio.ensure_future(call(containers.create, self._image, self.spec, self._user))
            try:
                self._container, self._expires = await asyncio.shield(creating)
                self._alive, self._ended = True, False
                async with asyncio.timeout(_START):
                    await call(engine().start, self._container)
                    await self._open_network()
                    self._shell = await self._open_shell()
            except BaseException as error:
                if not creating.done():  # cancelled, but the engine makes it all the same
                    creating.add_done_callback(_discard_made)
                self.kill()
                if isinstance(error, Exception) and is_trouble(error):
                    raise unavailable(error, f"no container of {self.spec.image} can be started") from error
                raise

    def _let_go(self) -> None:
        if self.proxy:
            self.proxy.close()
        self._leave_shell()
        if self._warden:
            self._warden.close()
        self._warden = None

    def _leave_shell(self) -> None:
        """What it left in the background lives on."""
        if self._shell:
            self._shell.close()
        self._shell = None

    async def _kill_processes(self, all_may_be_dead: bool = False) -> None:
        """All of the commands' user."""
        how = await self._warden.kill() if self._warden else "gone"
        self._leave_shell()
        self._warden = None
        if how == "stuck" or (how == "gone" and not all_may_be_dead):
            await self._restart()

    async def _restart(self) -> None:
        """The last resort; files stay, but for those in memory."""
        await call(engine().restart, self._container, timeout=0)
        await self._open_network()

    async def _open_network(self) -> None:
        if self.proxy:
            self.proxy.close()
            await self.proxy.serve(await call(containers.listen, self._container))

    async def _open_shell(self) -> Shell:
        trouble = ""
        for again in (False, True):
            if again:  # what lives in the background may leave no room for another process
                await self._kill_processes()
            try:
                async with asyncio.timeout(_START):
                    if not self._warden or self._warden.ended:
                        self._warden = await Warden.start(await self._stream(WARDEN))
                    return await Shell.start(await self._stream(KEEPER, self.spec.workdir))
            except (NoProcess, ShellRefused) as error:
                trouble = str(error)
        raise SandboxGone(f"no shell can be started: {trouble}")

    async def _stream(self, script: str, *arguments: str) -> Stream:
        reach = VARIABLES if self.proxy else {}
        environment = {"LANG": "C.UTF-8", **reach, **dict(self.spec.environment)}
        return await Stream.open(self._container, ["/bin/sh", "-c", script, "sh", *arguments], self._user, environment)

    async def _run(
        self, script: str, *arguments: str, stdin: bytes = b"", most: int = 1 << 16
    ) -> tuple[int, bytes, bytes]:
        """A short script, in a process of its own: exit status, output, complaints."""
        marked = f"IFS= read -r _\n({script}\n)\nprintf '\\036%s' $? >&2"
        trouble = b""
        for again in (False, True):
            if again:  # what lives in the background leaves no room for another process, or kills it
                await self._kill_processes()
            try:
                async with asyncio.timeout(_FILE_CALL), await self._stream(marked, *arguments) as stream:
                    output, complaint = await stream.converse(b"\n" + stdin, most)
            except NoProcess as error:
                trouble = str(error).encode()
                continue
            complaint, _, status = complaint.rpartition(b"\x1e")
            if status.isdigit():
                return int(status), output, complaint
            trouble = complaint or output
        raise NoProcess(trouble[-1000:].decode(errors="replace"))


def _discard_made(creating: "asyncio.Future[tuple[str, float]]") -> None:
    if not creating.cancelled() and not creating.exception():
        _discard(creating.result()[0])


def _discard(container: str) -> None:
    """In a thread, because the engine takes its time."""
    threading.Thread(target=_remove_or_log, args=(container,)).start()


def _remove_or_log(container: str) -> None:
    try:
        containers.remove(container)
    except Exception as error:  # the engine may be gone; the reaper tries again
        log.warning("container %s cannot be removed: %s", container[:12], error)
