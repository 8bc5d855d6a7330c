"""The tools of an MCP server as an environment: the server describes them, checks their arguments and answers.

Invariant: each episode has a server process of its own from `connect` until `close_episode`, held by one task (a client
may only be left where it was entered). A tool's error is its answer to the model. A server that does not start, dies or
misses a deadline is an `InfrastructureError` with its last words, never an answer, and is gone afterwards.

What tools there are must be known before an episode begins, so a server of the same command is asked once per process.
"""

import asyncio
import functools
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .errors import InfrastructureError, ToolError
from .tool_env import ToolEnv
from .tools import Tool

_LAST_WORDS = 500  # characters of a server's standard error that an error quotes
_STOP = 10.0  # the client gives a server 2 s to leave and 2 s after SIGTERM, then kills its process group
_SAME_EVERYWHERE = {"PYTHONHASHSEED": "0"}  # two servers agree on the order of a set


class McpEnv(ToolEnv):
    """Subclass it: name the `command`, `await self.connect()` in `setup`, write `grade`. Needs `argosy[mcp]`."""

    command: Sequence[str] = ()
    """The server's program and arguments, spoken to over standard input and output; "python" is the running one."""

    environment: Mapping[str, str] = {}
    """Variables it gets besides HOME, PATH and the like."""

    offered: Sequence[str] | None = None
    """The server's tools that the model gets; None: all. `call` reaches the others too, for setup and grading."""

    start_seconds: float = 60.0
    call_seconds: float = 30.0

    __server: "_Server | None" = None
    __known = False

    def tool_schemas(self) -> list[dict[str, Any]]:
        self.__learn_tools()
        return super().tool_schemas()

    async def connect(self, *arguments: str) -> None:
        """Start this episode's server, with `arguments` after those of the command."""
        await McpEnv.close_episode(self)
        self.__learn_tools()
        server = _Server((*self.command, *arguments), self.environment)
        await server.start(self.start_seconds)
        self.__server = server

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """The text that a tool answers; `ToolError` with the same text when the server says that it is an error."""
        if self.__server is None:
            raise RuntimeError(f"{type(self).__name__} has no server: `await self.connect()` in setup")
        return await self.__server.call(tool, arguments, self.call_seconds)

    async def close_episode(self) -> None:
        """Ends the server; whoever overrides it calls this one too."""
        server, self.__server = self.__server, None
        if server is not None:
            await server.stop()

    def __learn_tools(self) -> None:
        """The server's tools, and the class's own, which win where the names are the same."""
        if self.__known:
            return
        offers = _offers(tuple(self.command), tuple(self.environment.items()), self.start_seconds)
        if missing := set(self.offered or ()) - {tool.name for tool in offers}:
            has = ", ".join(tool.name for tool in offers)
            raise ValueError(
                f"{type(self).__name__}.offered: the server has no {', '.join(sorted(missing))}; it has {has}"
            )
        served = {tool.name: tool for tool in offers if self.offered is None or tool.name in self.offered}
        self.tools, self.__known = {**served, **self.tools}, True


@functools.cache
def _offers(command: tuple[str, ...], environment: tuple[tuple[str, str], ...], seconds: float) -> list[Tool]:
    """What a server of this command describes. In a thread, because it is asked where an event loop may be running."""

    async def ask() -> list[Tool]:
        server = _Server(command, dict(environment))
        await server.start(seconds)
        try:
            return [
                Tool.described(offer.name, offer.description or "", offer.input_schema, _caller(offer.name))
                for offer in await server.offers(seconds)
            ]
        finally:
            await server.stop()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()


def _caller(tool: str) -> Callable[..., Awaitable[str]]:
    def answer(env: McpEnv, /, **arguments: Any) -> Awaitable[str]:
        return env.call(tool, **arguments)

    return answer


class _Server:
    """One process and the client that speaks with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        if not command:
            raise ValueError("an McpEnv needs a `command`, such as ('python', 'server.py')")
        if importlib.util.find_spec("mcp") is None:
            raise ModuleNotFoundError('an McpEnv needs the package mcp: pip install "argosy[mcp]"', name="mcp")
        program, *self._arguments = command
        self._program = sys.executable if program == "python" else program
        self._environment = {**_SAME_EVERYWHERE, **environment}
        self._name = " ".join(command)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._leave = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        self._task = asyncio.create_task(self._serve())
        try:
            await asyncio.wait({self._task, self._client}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._client.done():
                return
            why = _cause(self._task.exception()) if self._task.done() else f"no answer within {seconds:g} s"
            raise InfrastructureError(f"the MCP server {self._name} does not start: {why}. {self._last_words()}")
        finally:
            if not self._client.done():
                await self.stop()

    async def offers(self, seconds: float) -> list[Any]:
        """Its tools, page after page."""
        page = await self._ask("tools/list", self._client.result().list_tools(), seconds)
        found = list(page.tools)
        while page.next_cursor is not None:
            page = await self._ask("tools/list", self._client.result().list_tools(cursor=page.next_cursor), seconds)
            found += page.tools
        return found

    async def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> str:
        result = await self._ask(tool, self._client.result().call_tool(tool, arguments), seconds)
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def stop(self) -> None:
        """Until the process is gone; safe to call twice."""
        if self._task is None or self._errors.closed:
            return
        self._leave.set()
        if not self._client.done():
            self._task.cancel()
        _, stuck = await asyncio.wait({self._task}, timeout=_STOP)
        for task in stuck:
            task.cancel()
        self._errors.close()

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        parameters = StdioServerParameters(command=self._program, args=self._arguments, env=self._environment)
        async with Client(stdio_client(parameters, errlog=self._errors)) as client:
            self._client.set_result(client)
            await self._leave.wait()

    async def _ask(self, what: str, question: Awaitable[Any], seconds: float) -> Any:
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        try:
            async with asyncio.timeout(seconds):
                return await question
        except TimeoutError:
            why = f"did not answer {what} within {seconds:g} s"
        except MCPError as refusal:
            if refusal.code == INVALID_PARAMS:  # how some servers refuse arguments
                raise ToolError(refusal.message) from None
            why = f"failed in {what}: {refusal.message}"
        error = InfrastructureError(f"the MCP server {self._name} {why}. {self._last_words()}")
        await self.stop()
        raise error

    def _last_words(self) -> str:
        """What the server wrote to its standard error, which also shows why it died."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - _LAST_WORDS))
        words = self._errors.read().strip()
        return f"It said: {words}" if words else "It said nothing."


def _cause(error: BaseException | None) -> str:
    """The first of what task groups wrap."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


def _text(result: Any) -> str:
    """What a model can read of a result; of the rest, what it is."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
