"""A persistent shell in a container: any POSIX shell (bash where there is one), and no Python.

Two streams. At the end of one, a *keeper* waits for the shell and tells how it ended. At the end of the other, a
*warden* waits for a word from us, or for our end, and kills everything of its user in one system call (`kill -9 -1`):
no setsid, double fork or fork bomb escapes that, and it takes no new process.

Invariant: the answer to a command is never another's. It ends with a mark that holds a fresh secret, which travels
through the shell's standard input and is in no variable, argument or descriptor that a command is given. What the
background writes between two commands is dropped. A shell whose command did not end with its mark is not used again.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from .docker_engine import Stream
from .guest.output import HeadAndTail

GRACE = 5.0  # seconds to kill a process tree
_LONGEST_MARK = 64
_UNSUSPICIOUS = 0.05  # seconds: what succeeds within them was not killed for memory
_MARK = re.compile(rb"\x1e([0-9a-f]{16}) (\w+) (\d+)\n")

_MARKS = r"""
__argosy() { local status=$?; printf '\036%s %s %s\n' "$2" "$1" "$status" >&9; return $status; } 2>/dev/null
__argosy_ooms() {
    local status=$? count=0 IFS=" " file key value
    for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ ! -r $file ] || while read -r key value; do [ "$key" != oom_kill ] || count=$value; done <$file
    done
    printf '\036%s ooms %s\n' "$1" "$count" >&9
    return $status
} 2>/dev/null
"""
KEEPER = f"""
IFS= read -r secret
mkdir -p -- "$1" 2>&1 && cd -- "$1" 2>&1 || exit
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
exec 9>&1 2>/dev/null
{_MARKS}
"$shell"
__argosy exit "$secret"
__argosy_ooms "$secret"
"""
WARDEN = "IFS= read -r _; echo ready; IFS= read -r _; kill -9 -1; echo killed"


class Warden:
    """Acts once."""

    def __init__(self, stream: Stream):
        self._stream = stream

    @classmethod
    async def start(cls, stream: Stream) -> "Warden":
        """Of a stream that runs `WARDEN`."""
        await stream.write(b"\n")
        said = await stream.read() or (0, b"no warden can be started")
        if said[1] != b"ready\n":
            stream.close()
            raise ShellRefused(said[1].decode(errors="replace").strip())
        return cls(stream)

    async def kill(self) -> Literal["killed", "gone", "stuck"]:
        """Everything of its user. Where it was itself killed before, others may live."""
        try:
            async with asyncio.timeout(GRACE):
                await self._stream.write(b"\n")
                return "killed" if await self._stream.read() == (1, b"killed\n") else "gone"
        except TimeoutError:
            return "stuck"
        except ConnectionError:
            return "gone"
        finally:
            self._stream.close()

    @property
    def ended(self) -> bool:
        """It was killed itself, as far as we have heard."""
        return self._stream.ended

    def close(self) -> None:
        """Soon everything of its user is killed."""
        self._stream.close()


class ShellRefused(Exception):
    """No shell in this container; the text is what it said."""


@dataclass
class Ended:
    how: Literal["end", "exit", "late", "lost", "unstarted"]
    """The command did; the shell did; nothing by the deadline; the shell vanished; it had vanished before."""
    status: int = 137
    ooms: int = 0
    """Processes that the kernel killed for memory meanwhile, if that is known."""
    output: bytes = b""
    truncated: bool = False


class Shell:
    """One command at a time."""

    def __init__(self, stream: Stream):
        self._stream, self._secret = stream, secrets.token_hex(8)
        self._pending = b""
        self.ooms = 0
        """Processes killed for memory in this container, as last heard."""

    @classmethod
    async def start(cls, stream: Stream) -> "Shell":
        """Of a stream that runs `KEEPER`."""
        shell = cls(stream)
        said = bytearray()
        await stream.write(f"{shell._secret}\nexec 2>&1\n{_MARKS}__argosy_ooms {shell._secret}\n".encode())
        mark = await shell._until("", said.extend)
        if mark is None or mark[0] != "ooms":
            stream.close()
            raise ShellRefused(said.decode(errors="replace").strip() or "it ended without a word")
        shell.ooms = mark[1]
        return shell

    async def run(self, command: str, timeout: float, keep: int, kill: Callable[[], Awaitable[object]]) -> Ended:
        """Run a command, which has no NUL in it; at its deadline `kill` everything."""
        output, began = HeadAndTail(keep), time.monotonic()
        ended = Ended("lost")
        try:
            async with asyncio.timeout(timeout):
                await self._run(command, output, ended)
        except TimeoutError:
            ended.how = "late"
            await kill()
            async with asyncio.timeout(GRACE):
                while await self._until("", output.add):
                    pass
        except ConnectionError:
            pass
        if ended.how == "exit" or (ended.how == "end" and (ended.status or time.monotonic() - began > _UNSUSPICIOUS)):
            await self._count_ooms(ended)
        ended.output, ended.truncated = output.result()
        return ended

    async def _run(self, command: str, output: HeadAndTail, ended: Ended) -> None:
        nonce = secrets.token_hex(8)
        if await self._stale():
            ended.how = "unstarted"
            return
        quoted = "'" + command.replace("'", r"'\''") + "'"
        lines = f"command eval {quoted} </dev/null >&9 2>&1 9>&-\n{{ __argosy end {nonce}; }} 2>/dev/null\n"
        await self._stream.write(lines.encode(errors="replace"))
        if found := await self._until(nonce, output.add):
            ended.how, ended.status = ("end" if found[0] == "end" else "exit"), found[1]

    async def _stale(self) -> bool:
        """Drop what the background wrote meanwhile; True when the shell is found to have ended."""
        try:
            async with asyncio.timeout(0):
                await self._until("", lambda _: None)
                return True
        except TimeoutError:
            self._pending = b""
            return False

    async def _count_ooms(self, ended: Ended) -> None:
        try:
            async with asyncio.timeout(GRACE):
                if ended.how == "end":
                    await self._stream.write(f"{{ __argosy_ooms {self._secret}; }} 2>/dev/null\n".encode())
                found = await self._until("", lambda _: None)
        except (TimeoutError, ConnectionError):  # whatever it is, the next command meets it
            return
        if found and found[0] == "ooms":
            ended.ooms, self.ooms = found[1] - self.ooms, found[1]

    def close(self) -> None:
        """The shell ends; what it left in the background lives on."""
        self._stream.close()

    async def _until(self, nonce: str, sink: Callable[[bytes], None]) -> tuple[str, int] | None:
        """Read up to a mark of ours or with this secret; what comes before goes to the sink. None at the end."""
        secret = self._secret.encode(), nonce.encode()
        while True:
            for mark in _MARK.finditer(self._pending):
                if mark[1] in secret:
                    sink(self._pending[: mark.start()])
                    self._pending = self._pending[mark.end() :]
                    return mark[2].decode(), int(mark[3])
            safe = max(0, len(self._pending) - _LONGEST_MARK)
            sink(self._pending[:safe])
            self._pending = self._pending[safe:]
            piece = await self._stream.read()
            if piece is None:
                sink(self._pending)
                self._pending = b""
                return None
            self._pending += piece[1]
