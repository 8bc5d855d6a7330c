"""The Docker engine, as far as sandboxes need it: calls, and byte streams of what runs in a container.

Invariant: no call waits for ever (the client has a timeout of its own), and an engine that does not answer is an error
that says so. The library is synchronous, so that calls go through threads; streams are asyncio's.
"""

import asyncio
import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import InfrastructureError, SandboxUnavailable

T = TypeVar("T")
_STDOUT = 1
_COMPLAINTS = 8192  # bytes
_SECONDS = 60.0  # of silence from the engine
_LONG_SECONDS = 900.0  # the same, while it loads or builds an image


def address() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def engine(patient: bool = False) -> Any:
    """The library's client; one for a process and address."""
    return _engine(address(), os.getpid(), _LONG_SECONDS if patient else _SECONDS)


@functools.cache
def _engine(_address: str, pid: int, seconds: float) -> Any:
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailable('the Docker back end needs its library: pip install "docker>=7.1"') from error
    try:
        return docker.APIClient(**docker.utils.kwargs_from_env(), version="auto", timeout=seconds, max_pool_size=32)
    except docker.errors.DockerException as error:
        raise no_answer(error) from error


def no_answer(error: Exception) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"no Docker engine answers at {address()}. Start one (systemctl start docker, or dockerd as root), install one "
        "(apt install docker.io), or set DOCKER_HOST to where one is; this user must be allowed to use it (group "
        f"docker). {error}"
    )


def is_trouble(error: Exception) -> bool:
    """Of the engine, the container or the way to them; not of what was asked for."""
    from docker.errors import DockerException
    from requests import RequestException

    kinds = (DockerException, RequestException, NoProcess, InfrastructureError, ConnectionError, TimeoutError)
    return isinstance(error, kinds)


def unavailable(error: Exception, what: str) -> SandboxUnavailable:
    """What to tell when something could not be begun: `what`, unless it is the engine that is not there."""
    from requests import ConnectionError

    return no_answer(error) if isinstance(error, ConnectionError) else SandboxUnavailable(f"{what}: {error}")


async def call(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return await asyncio.to_thread(functools.partial(function, *arguments, **options))


class NoProcess(Exception):
    """The container runs, but no process can be started in it: no such program, or no room for one more."""


class Stream:
    """What a process in a container reads and writes, without a terminal."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._header = b""

    @classmethod
    async def open(cls, container: str, command: list[str], user: str, environment: dict[str, str]) -> "Stream":
        """Start a command. It must not write before it has read a line: the library may swallow what comes earlier."""
        api = engine()

        def start() -> socket.socket:
            from docker.errors import APIError

            process = api.exec_create(container, command, stdin=True, user=user, environment=environment)
            try:
                raw = api.exec_start(process["Id"], socket=True)
            except APIError as error:
                if "OCI runtime" in str(error):
                    raise NoProcess(str(error.explanation)) from error
                raise
            connection = getattr(raw, "_sock", raw)
            if type(connection) is not socket.socket:
                raise SandboxUnavailable(
                    f"sandboxes need a plain connection to Docker, not {address()}: forward it, "
                    "ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST, and set DOCKER_HOST=unix:///tmp/docker.sock"
                )
            ours = socket.socket(fileno=connection.detach())
            ours.setblocking(False)
            return ours

        return cls(*await asyncio.open_connection(sock=await call(start)))

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def converse(self, words: bytes, most: int) -> tuple[bytes, bytes]:
        """All output and the end of the complaints; OSError (EFBIG) for more than `most` bytes of output."""
        sending = asyncio.create_task(self._say(words))
        output, complaints = bytearray(), bytearray()
        try:
            while (piece := await self.read()) is not None:
                kind, data = piece
                if kind == _STDOUT:
                    output += data
                else:
                    complaints = (complaints + data)[-_COMPLAINTS:]
                if len(output) > most:
                    raise OSError(errno.EFBIG, f"larger than {most} bytes")
        finally:
            sending.cancel()
        return bytes(output), bytes(complaints)

    async def _say(self, words: bytes) -> None:
        try:
            await self.write(words)
            self._writer.write_eof()
        except ConnectionError:
            pass  # it wanted no more; what it answers tells why

    async def read(self) -> tuple[int, bytes] | None:
        """A piece of standard output (1) or standard error (2); None at the end."""
        try:
            self._header = self._header or await self._reader.readexactly(8)  # kept, should we be cancelled now
            piece = self._header[0], await self._reader.readexactly(int.from_bytes(self._header[4:], "big"))
            self._header = b""
            return piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @property
    def ended(self) -> bool:
        """Nothing more will be read."""
        return self._reader.at_eof()

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()
