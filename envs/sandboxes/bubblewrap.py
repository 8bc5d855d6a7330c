"""A sandbox of bubblewrap, from the owner's side: a conversation with the guest program inside.

Invariant: every call ends, at its own deadline (kept by the guest, which kills the whole process tree) or a few
seconds later at ours (which kills the guest). A call that was cut short kills the sandbox, because the next answer
would be the wrong one.
"""

import asyncio
import json
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SandboxGone, SandboxUnavailable
from .archive import pattern, sift
from .cgroup import Group, create
from .launch import explain, launch
from .network import Proxy
from .sandbox import Sandbox
from .spec import DEFAULT_SPEC, Outcome, Result, SandboxSpec

_LENGTHS = struct.Struct(">II")
_GRACE = 10.0  # seconds beyond a call's deadline before the guest itself counts as stuck; machines are busy
_START = 30.0


class BubblewrapSandbox(Sandbox):
    """Besides what every sandbox can, it calls Python functions in milliseconds."""

    def __init__(
        self,
        spec: SandboxSpec,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        group: Group | None,
    ):
        self.spec = spec
        self._process, self._group = process, group
        self._reader, self._writer = streams
        assert self._process.stderr is not None
        self._stderr, self._words = self._process.stderr, b""
        self._turn = asyncio.Lock()
        self._alive = True
        self._oom_kills = 0
        self.proxy = Proxy(spec.network) if spec.network else None
        """The way out, which counts what was `refused`; None where there is none."""

    @classmethod
    async def open(cls, spec: SandboxSpec = DEFAULT_SPEC) -> "BubblewrapSandbox":
        group = create(spec.limits)
        launched = None
        try:
            launched = launch(spec, group.join if group else ())
            streams = await asyncio.open_connection(sock=launched.connection)
        except BaseException:
            if launched:
                launched.process.kill()
            if group:
                group.remove()
            raise
        sandbox = cls(spec, launched.process, streams, group)
        try:
            async with asyncio.timeout(_START):
                await sandbox._receive()
                if sandbox.proxy:
                    await sandbox.proxy.serve(launched.listener())
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            await sandbox.close()
            raise SandboxUnavailable(explain(sandbox._last_words())) from error
        except BaseException:
            sandbox.kill()
            raise
        finally:
            launched.passage.close()
        return sandbox

    @property
    def alive(self) -> bool:
        return self._alive and not self.ended

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def exec(self, command: str, timeout: float = 60.0, fresh: bool = False) -> Result:
        header, output = await self._request(
            {"do": "run", "seconds": timeout, "fresh": fresh}, _encode(command), timeout
        )
        code, reason = header["exit"], header["reason"]
        if code == 137 and reason != "timeout" and self._ran_out_of_memory():
            reason = "oom"
        return Result(code, output.decode(errors="replace"), header["truncated"], reason)

    async def write(self, path: str, content: str | bytes, executable: bool = False) -> None:
        header = {"do": "write", "path": path, "executable": executable}
        await self._request(header, _encode(content) if isinstance(content, str) else content)

    async def read(self, path: str) -> bytes:
        return (await self._request({"do": "read", "path": path}))[1]

    async def snapshot(self, paths: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> bytes:
        wanted = ["."] if paths is None else list(paths)
        return (await self._request({"do": "snapshot", "paths": wanted, "exclude": pattern(exclude)}))[1]

    async def restore(self, tar: bytes) -> None:
        await self._request({"do": "restore"}, await asyncio.to_thread(sift, tar, self.spec.limits.disk))

    async def run_python(
        self,
        source: str,
        function: str,
        arguments: Sequence[Sequence[Any]],
        timeout: float = 2.0,
        files: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Call `function` of `source` with each list of arguments: one `Outcome` each, within `timeout` for all.

        A fork of the warm interpreter (2-4 ms) with the standard library and, as modules, the workspace; `files` are
        written there first. Arguments and values travel as JSON (a tuple comes back as a list). Everything else that
        runs in the sandbox is killed.
        """
        request = {"do": "python", "source": source, "function": function, "seconds": timeout}
        request |= {"arguments": [list(a) for a in arguments], "files": dict(files or {})}
        header, lines = await self._request(request, seconds=timeout)
        outcomes = [_outcome(line) for line in lines.split(b"\n") if line]
        missing = Outcome(error=_why_missing(header["reason"], timeout))
        return outcomes + [missing] * (len(arguments) - len(outcomes))

    async def reset(self) -> None:
        header, _ = await self._request({"do": "reset"})
        if not header["clean"]:
            self.kill()
            raise SandboxGone("the sandbox could not be made clean again and was removed")

    async def close(self) -> None:
        self._alive = False
        self._writer.close()
        for _ in range(200):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        else:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, _GRACE)
        self._last_words()
        self._stderr.close()
        self._let_go()
        for _ in range(20):
            if self._group is None or self._group.remove():
                break
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        self._alive = False
        self._process.kill()
        self._writer.close()
        self._let_go()

    def _let_go(self) -> None:
        if self.proxy:
            self.proxy.close()
        if self._group:
            self._group.remove()

    def _ran_out_of_memory(self) -> bool:
        """The kernel was quicker than the guest."""
        before, self._oom_kills = self._oom_kills, self._group.oom_kills() if self._group else 0
        return self._oom_kills > before

    async def _request(
        self, header: dict[str, Any], body: bytes = b"", seconds: float = 20.0
    ) -> tuple[dict[str, Any], bytes]:
        encoded = json.dumps(header).encode()
        frame = _LENGTHS.pack(len(encoded), len(body)) + encoded + body
        async with self._turn:
            if not self._alive:
                raise SandboxGone("the sandbox is closed")
            try:
                async with asyncio.timeout(seconds + _GRACE):
                    self._writer.write(frame)
                    await self._writer.drain()
                    answer, payload = await self._receive()
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
                self.kill()
                late = isinstance(error, TimeoutError)
                fate = f"did not answer within {seconds + _GRACE:g} s" if late else "died"
                raise SandboxGone(f"the sandbox {fate} during {header['do']!r}. {self._last_words()}") from error
            except BaseException:
                self.kill()  # cancelled half-way: the next answer would be the wrong one
                raise
        if "errno" in answer:
            raise OSError(answer["errno"], answer["message"])
        return answer, payload

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        parts = []
        while True:
            header_size, body_size = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
            data = await self._reader.readexactly(header_size + body_size)
            parts.append(data[header_size:])
            header = json.loads(data[:header_size])
            if "more" not in header:
                return header, parts[0] if len(parts) == 1 else b"".join(parts)

    def _last_words(self) -> str:
        """What the process wrote to stderr so far."""
        if not self._stderr.closed:
            os.set_blocking(self._stderr.fileno(), False)
            self._words += self._stderr.read(1 << 16) or b""
        return self._words.decode(errors="replace").strip()[-2000:]


def _encode(text: str) -> bytes:
    """A model's JSON can hold half a surrogate pair; UTF-8 cannot."""
    return text.encode(errors="replace")


def _outcome(line: bytes) -> Outcome:
    """The line comes from a process that ran code of others: whatever it is, it becomes an outcome."""
    try:
        value, error = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return Outcome(error="Crashed: the result is not readable")
    return Outcome(value) if error is None else Outcome(error=str(error)[:300])


def _why_missing(reason: str | None, timeout: float) -> str:
    known = {
        None: "Crashed: the process ended before it returned a result",
        "timeout": f"Timeout: no result within {timeout:g} s",
        "oom": "OutOfMemory: too much memory was used",
        "output": "OutputTooLarge: the results do not fit",
    }
    return known.get(reason, f"Crashed: {reason}")
