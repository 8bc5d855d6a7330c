"""An OpenEnv server: one of its sessions, spoken to over a WebSocket, and one started here by its command.

Invariant: a question is answered within its deadline or the session is over, with an `InfrastructureError` that says
what happened; only an action of the wrong form is the model's mistake (`ToolError`). A server started here ends with
this process, also when that is killed.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from typing import Any, BinaryIO

import aiohttp

from ..errors import InfrastructureError, ToolError

_BUSY = 0.2  # seconds until the server is asked again for a place
_CLOSE_SECONDS = 5.0
_LARGEST = 64 * 2**20  # bytes of an observation
_LAST_WORDS = 500  # characters of what a dead server wrote


class Session:
    """One world on the server, from `open` to `close`."""

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds = url.rstrip("/"), seconds
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> dict[str, Any]:
        """Connect; what the server publishes of its actions and observations."""
        await self.close()
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self.seconds):
                async with self._http.get(f"{self.url}/schema") as response:
                    response.raise_for_status()
                    schema = await response.json()
                self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=_LARGEST)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            await self.close()
            raise InfrastructureError(f"no OpenEnv server answers at {self.url}: {error!r}") from error
        return schema if isinstance(schema, dict) else {}

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode. A server that is full is asked again, until the deadline."""
        deadline = time.monotonic() + self.seconds
        while True:
            answer = await self._ask("reset", data)
            if answer.get("code") != "CAPACITY_REACHED":
                return self._observed("reset", answer)
            if time.monotonic() > deadline:
                await self._fail(f"has no free session ({answer.get('message')}): raise its max_concurrent_envs")
            await asyncio.sleep(_BUSY)
            await self.open()

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        answer = await self._ask("step", action)
        if answer.get("code") == "VALIDATION_ERROR":
            errors = answer.get("errors") or [{"loc": (), "msg": answer.get("message")}]
            raise ToolError("; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors[:3]))
        return self._observed("step", answer)

    async def close(self) -> None:
        """Say goodbye, if anybody listens; safe to call twice."""
        connection, http, self._socket, self._http = self._socket, self._http, None, None
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                if connection is not None and not connection.closed:
                    await connection.send_json({"type": "close"})
                    await connection.close()
        if http is not None:
            await http.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if self._socket is None:
            raise InfrastructureError(f"the session with {self.url} is over")
        try:
            async with asyncio.timeout(self.seconds):
                await self._socket.send_json({"type": kind, "data": data})
                message = await self._socket.receive()
        except TimeoutError:
            await self._fail(f"did not answer {kind} within {self.seconds:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            await self._fail(f"is lost in {kind}: {error!r}")
        if message.type is not aiohttp.WSMsgType.TEXT:
            await self._fail(f"closed the connection in {kind} ({message.type.name})")
        try:
            answer = json.loads(message.data)
            return {"type": answer["type"], **answer["data"]}
        except (ValueError, KeyError, TypeError):
            await self._fail(f"answered {kind} with {message.data!r:.200}")
            raise AssertionError from None

    def _observed(self, kind: str, answer: dict[str, Any]) -> dict[str, Any]:
        if answer["type"] != "observation" or not isinstance(answer.get("observation"), dict):
            what = f"{answer.get('code', answer['type'])}: {answer.get('message', answer)}"
            raise InfrastructureError(f"the OpenEnv server at {self.url} failed in {kind}: {what:.500}")
        return answer

    async def _fail(self, why: str) -> None:
        await self.close()
        raise InfrastructureError(f"the OpenEnv server at {self.url} {why}")


class LocalServer:
    """A server of this process's own. Started where no event loop has to wait for it; `ready` waits."""

    def __init__(self, command: tuple[str, ...]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._name = f"http://127.0.0.1:{port}", " ".join(command)
        self.answered = False
        arguments = [argument.replace("{port}", str(port)) for argument in command]
        if setpriv := shutil.which("setpriv"):
            arguments = [setpriv, "--pdeathsig", "KILL", "--", *arguments]
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._end()

    async def ready(self, seconds: float) -> None:
        """Until it answers; InfrastructureError with its last words if it never does."""
        deadline = time.monotonic() + seconds
        async with aiohttp.ClientSession() as http:
            while self.alive and time.monotonic() < deadline:
                try:
                    async with http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(2)) as response:
                        if response.status == 200:
                            self.answered = True
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass  # not yet
                await asyncio.sleep(0.05)
        why = f"does not answer within {seconds:g} s" if self.alive else f"ended with {self._process.returncode}"
        self.stop()
        size = self._output.seek(0, 2)
        self._output.seek(max(0, size - _LAST_WORDS))
        words = self._output.read().decode(errors="replace").strip() or "nothing"
        raise InfrastructureError(f"the OpenEnv server {self._name!r} {why}. It said: {words}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it with all that it started."""
    import os
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
