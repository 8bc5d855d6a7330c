"""The one way to Redis: every call is retried until it is served or its deadline passes, visibly.

Invariant: what is sent here is idempotent, because an answer can get lost on the way back after the call took effect.
Redis being away, loading its file, full, or unable to write its disk delays a call and never drops it. A restarted
Redis (its run_id changed) is noticed before the first command reaches it, so `on_restart` can repair what it forgot.
"""

import hashlib
import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, OutOfMemoryError
from redis.retry import Retry

from .errors import RedisRefused, RedisUnavailable
from .memory import Memory
from .settings import BufferSettings

log = logging.getLogger(__name__)

SOCKET_SECONDS = 15.0
LONGEST_BLOCK_SECONDS = 10.0  # a blocking read must end before its socket times out
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
WARN_EVERY_SECONDS = 5.0
REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)

# Longer values are sent from where they are: malloc maps more than this afresh each time, page by page.
COPY_BELOW = 1 << 17

T = TypeVar("T")
Command = Sequence[str | bytes | int | float]


class Connection:
    """A thread-safe pool to one Redis. It waits for a Redis that is away; whoever starts Redis ends the wait."""

    def __init__(self, settings: BufferSettings, on_restart: Callable[[], None] = lambda: None) -> None:
        self._patience = settings.patience_seconds
        self.where = _without_password(settings.url)
        self._on_restart = on_restart
        self.run_id = ""  # of the Redis behind; unknown before the first call
        self._restarts = self._repaired = 0  # seen, and told to `on_restart`
        self._repair_lock = threading.RLock()
        self._repairer: int | None = None  # the thread that calls `on_restart`
        self._client: redis.Redis = redis.Redis.from_url(
            settings.url,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=Retry(NoBackoff(), 0),  # ours below also knows LOADING, a full memory and a full disk
            redis_connect_func=self._greet,
            protocol=2,  # see _read_number
        )
        self._idle: list[Any] = []  # connections of _exchange()
        if not settings.url.startswith("unix:"):
            self._client.connection_pool.connection_kwargs["socket_keepalive"] = True

    def call(self, what: str, operation: Callable[[redis.Redis], T]) -> T:
        """Do `operation`; after a failure that can pass, do it again, until the patience of the settings ends."""
        deadline = time.monotonic() + self._patience
        pause, warned = FIRST_PAUSE_SECONDS, 0.0
        while True:
            try:
                self._repair()
                return operation(self._client)
            except REFUSALS as error:
                raise RedisRefused(f"Redis at {self.where}: {error}; check the user and password in its url") from error
            except redis.RedisError as error:
                if distrust := _distrust(error):
                    raise RedisRefused(f"Redis at {self.where}: {distrust}; check ssl_ca_certs in its url") from error
                reason = _passing_reason(error)
                if reason is None:
                    raise
                now = time.monotonic()
                if now > deadline:
                    raise RedisUnavailable(
                        f"{what}: Redis at {self.where} {reason} for {self._patience:g} s ({error}). "
                        "Check that redis-server runs there, that its disk and maxmemory have room, and the network."
                    ) from error
                if now > warned + WARN_EVERY_SECONDS and self._repaired == self._restarts:
                    log.warning("%s waits: Redis at %s %s (%s)", what, self.where, reason, error)
                    warned = now
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def values(self, what: str, names: Sequence[str], memory: Memory) -> list[memoryview | None]:
        """The values of these names, None for one that is gone, in `memory`."""
        return self.call(what, lambda _: self._exchange([("MGET", *names)], partial(_read_values, memory)))

    def script(self, source: str) -> Callable[..., Any]:
        """A Lua script; call it with (what, keys, args, before). Each try makes its arguments anew: run_id may have
        changed. `before` are commands that go ahead of the script in the same round trip."""
        sha = hashlib.sha1(source.encode()).hexdigest().encode()  # how Redis names it

        def run(what: str, keys: list[Any], args: Callable[[], list[Any]], before: Sequence[Command] = ()) -> Any:
            def commands() -> list[Command]:
                return [*before, (b"EVALSHA", sha, len(keys), *keys, *args())]

            def load_if_needed(r: redis.Redis) -> Any:
                try:
                    return self._exchange(sent := commands(), partial(_read_last, len(sent)))
                except redis.exceptions.NoScriptError:
                    r.script_load(source)
                    return self._exchange(sent := commands(), partial(_read_last, len(sent)))

            return self.call(what, load_if_needed)

        return run

    def last_entry(self, what: str, stream: str) -> str:
        """The id of a stream's newest entry, to wait for the next one."""
        entries: Any = self.call(what, lambda r: r.xrevrange(stream, count=1))
        return entries[0][0].decode() if entries else "0-0"

    def wait_for_entry(self, what: str, stream: str, after: str, deadline: float) -> bool:
        """Wait for an entry after the id `after`; False if there was none until `deadline` (time.monotonic())."""
        while (seconds := min(deadline - time.monotonic(), LONGEST_BLOCK_SECONDS)) > 0:
            block = max(1, int(seconds * 1000))  # 0 would block for ever
            if self.call(what, partial(redis.Redis.xread, streams={stream: after}, count=1, block=block)):
                return True
        return False

    def close(self) -> None:
        self._client.close()
        while self._idle:
            self._idle.pop().disconnect()

    def _exchange(self, commands: Sequence[Command], read: Callable[[Any], T]) -> T:
        """Send these commands in one piece, and read what comes back.

        redis-py's own pool and pipeline take five times the CPU, more than the server.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        if connection.pid != os.getpid():  # the parent goes on using it
            connection = self._connect()
        try:
            connection.send_packed_command(_packed(commands))
            found = read(connection)
        except BaseException:
            connection.disconnect()  # or its next user would read the answers that are still to come
            while self._idle:  # what broke this one broke them
                self._idle.pop().disconnect()
            raise
        self._idle.append(connection)
        if isinstance(found, redis.RedisError):
            raise found
        return found

    def _connect(self) -> Any:
        pool = self._client.connection_pool  # whose own make_connection stops at a hundred, dead ones included
        return pool.connection_class(**pool.connection_kwargs)

    def _greet(self, connection: Any) -> None:
        """Runs on every new connection, before its first command. A restart closed all the old ones."""
        connection.on_connect()
        connection.send_command("INFO", "server")
        lines = connection.read_response().decode().splitlines()
        before, self.run_id = self.run_id, next(x.removeprefix("run_id:") for x in lines if x.startswith("run_id:"))
        self._restarts += before not in ("", self.run_id)
        if self._repaired != self._restarts and self._repairer != threading.get_ident():
            raise redis.ConnectionError("restarted")

    def _repair(self) -> None:
        """Whoever comes while another thread repairs waits for it here."""
        if self._repaired == self._restarts:
            return
        with self._repair_lock:  # reentrant, as on_restart calls Redis through this object
            if self._repairer is not None:
                return
            self._repairer = threading.get_ident()
            try:
                while self._repaired != (restarts := self._restarts):
                    log.warning("Redis at %s was restarted", self.where)
                    self._on_restart()
                    self._repaired = restarts
            finally:
                self._repairer = None


def _packed(commands: Sequence[Command]) -> list[bytes]:
    """The commands in Redis' protocol, as few pieces."""
    pieces: list[bytes] = []
    short: list[bytes] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for part in command:
            data = part if isinstance(part, bytes) else str(part).encode()
            if len(data) < COPY_BELOW:
                short.append(b"$%d\r\n%b\r\n" % (len(data), data))
            else:
                pieces += [b"%b$%d\r\n" % (b"".join(short), len(data)), data]
                short = [b"\r\n"]
    return [*pieces, b"".join(short)]


def _read_last(n: int, connection: Any) -> Any:
    """The last of `n` answers, or the first error."""
    error = answer = None
    for _ in range(n):
        try:
            answer = connection.read_response()
        except redis.ResponseError as problem:
            error = error or problem
    return error or answer


def _read_values(memory: Memory, connection: Any) -> list[memoryview | None]:
    """The answer to MGET. Read straight to where each value stays: redis-py's reader copies it twice on its way, and
    takes twice as long for a megabyte."""
    values: list[memoryview | None] = []
    try:
        with connection._sock.makefile("rb") as file:
            for _ in range(_read_number(file, b"*")):
                size = _read_number(file, b"$")
                value = memory.take(max(size, 0), np.uint8)
                if size >= 0 and (file.readinto(value.data), file.read(2)) != (size, b"\r\n"):
                    raise redis.ConnectionError("the connection was closed within a value")
                values.append(value.data.toreadonly() if size >= 0 else None)
    except TimeoutError as error:
        raise redis.TimeoutError(str(error)) from error
    except OSError as error:
        raise redis.ConnectionError(str(error)) from error
    return values


def _read_number(file: BinaryIO, kind: bytes) -> int:
    """How many there are of what follows, in version 2 of Redis' protocol."""
    line: bytes = file.readline()
    if line[:1] == kind:
        return int(line[1:])
    if line.startswith(b"-LOADING"):
        raise redis.BusyLoadingError(line.decode())
    raise redis.ResponseError(line.decode()) if line else redis.ConnectionError("the connection was closed")


def _passing_reason(error: redis.RedisError) -> str | None:
    """Why waiting may help, as a phrase; None if it will not."""
    text = str(error)
    if isinstance(error, redis.BusyLoadingError):
        return "is loading its file"
    if text.startswith("BUSY "):
        return "is busy with a script"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "does not answer"
    if isinstance(error, OutOfMemoryError) or "OOM command" in text:  # the text: out of a script, before Redis 7
        return "is full (maxmemory)"
    if "MISCONF" in text:
        return "cannot write its disk"
    if isinstance(error, redis.ReadOnlyError):
        return "is a read-only replica"
    return None


def _distrust(error: BaseException) -> str | None:
    """Why TLS was refused, on either side; None if it was not. Waiting makes no certificate valid."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
