"""Worlds that an OpenEnv server holds: it publishes the actions, the model gets them as tools.

Invariant: an episode is one session of the server, from `setup` until `close_episode`. What single steps earn is the
turn's; what the last one earns is the grade. So an episode that is cut off earned what its turns earned.
"""

import asyncio
import functools
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import InfrastructureError
from ..tasks.validation import Check
from ..tool_env import Grade, ToolEnv
from ..tools import Tool, as_text
from .openenv_server import LocalServer, Session
from .order import check_split

_HELD_OUT = 10**9  # the seeds of held-out worlds begin here
_LOOKED_AT = 10  # worlds of a validation without a limit


class OpenEnv(ToolEnv):
    """The environment `argosy/openenv`.

    `url` is where a server listens. Or `command` starts one for this process; `{port}` in it becomes the port. `reset`
    goes to the server with the seed. An answer, or a place on a full server, is waited for up to `seconds`.
    """

    def __init__(
        self,
        url: str = "",
        command: str | Sequence[str] = "",
        reset: Mapping[str, Any] | None = None,
        system: str = "",
        max_turns: int = 16,
        seconds: float = 60.0,
        start_seconds: float = 120.0,
        split: str = "all",
    ):
        check_split(split)
        if bool(url) == bool(command):
            raise ValueError("an OpenEnv environment needs either the url of a server or the command that starts one")
        self.url, self.command = url, tuple(shlex.split(command) if isinstance(command, str) else command)
        if self.command and not any("{port}" in argument for argument in self.command):
            raise ValueError(f"command must say where its port goes, as {{port}}: {' '.join(self.command)}")
        self.system, self.max_turns = system, max_turns
        self.seconds, self._start_seconds = seconds, start_seconds
        self.reset_parameters, self.first_seed = dict(reset or {}), _HELD_OUT if split == "held_out" else 0
        self._session: Session | None = None
        self._known = False
        self._earned = 0.0

    def tool_schemas(self) -> list[dict[str, Any]]:
        self._learn_tools()
        return super().tool_schemas()

    async def setup(self, seed: int, options: dict[str, Any]) -> str:
        self._learn_tools()
        self._earned = 0.0
        self._session = Session(await self._server(), self.seconds)
        await self._session.open()
        world = await self._session.reset({**self.reset_parameters, "seed": seed + self.first_seed})
        if world.get("done"):
            raise InfrastructureError(
                f"the OpenEnv server at {self._session.url} says that seed {seed} is over at once"
            )
        return _told(world["observation"])

    async def act_on_server(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take a step; what the world shows of it."""
        assert self._session is not None, "setup opens it"
        world = await self._session.step(action)
        reward = float(world.get("reward") or 0.0)
        if world.get("done"):
            self._earned = reward
            self.finish()
        else:
            self.add_reward(reward)
        observation: dict[str, Any] = world["observation"]
        return observation

    def grade(self) -> Grade:
        return Grade(self._earned)

    async def close_episode(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def validate(self, limit: int | None = None) -> AsyncIterator[Check]:
        """Every world begins, and begins the same when it does so again."""
        for seed in range(limit or _LOOKED_AT):
            try:
                first, again = [await self.start(seed) for _ in range(2)]
                problem = (None, "") if first == again else ("flaky", f"began with {first[-1]}, then with {again[-1]}")
            except InfrastructureError as error:
                problem = ("does not begin", str(error))
            finally:
                await self.stop()
            yield Check(f"openenv/{seed}", *problem)

    def _learn_tools(self) -> None:
        """What the server offers, asked once per process; in a thread, because an event loop may be running here."""
        if self._known:
            return
        if self.command:
            server = _local_server(self.command)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, server.ready(self._start_seconds)).result()
            self.url = server.url
        with ThreadPoolExecutor(1) as thread:
            self.tools = {**thread.submit(_offers, self.url, self.seconds).result(), **self.tools}
        self._known = True

    async def _server(self) -> str:
        if self.command:
            server = _local_server(self.command)
            try:
                await server.ready(self._start_seconds)
            except InfrastructureError:
                if not server.answered:
                    raise
                server = _local_server(self.command)  # it was about to end when we came
                await server.ready(self._start_seconds)
            self.url = server.url
        return self.url


_servers: dict[tuple[str, ...], LocalServer] = {}


def _local_server(command: tuple[str, ...]) -> LocalServer:
    """The process's one server of this command, started again if it died."""
    server = _servers.get(command)
    if server is None or not server.alive:
        server = _servers[command] = LocalServer(command)
    return server


@functools.cache
def _offers(url: str, seconds: float) -> dict[str, Tool]:
    return asyncio.run(_ask_for_tools(url, seconds))


async def _ask_for_tools(url: str, seconds: float) -> dict[str, Tool]:
    """One tool per MCP tool of a server that has those, else one that takes the server's action."""
    session = Session(url, seconds)
    action = (await session.open()).get("action") or {}
    properties = {name: value for name, value in action.get("properties", {}).items() if name != "metadata"}
    try:
        if not properties or action.get("title") in ("CallToolAction", "ListToolsAction"):
            listed = (await session.step({"type": "list_tools"}))["observation"].get("tools") or []
            tools = [_mcp_tool(offer) for offer in listed]
        else:
            parameters = {key: value for key, value in action.items() if key in ("$defs", "required")}
            parameters = {"type": "object", "properties": properties, **parameters}
            tools = [Tool.described(_name(action), action.get("description", ""), parameters, _step)]
    finally:
        await session.close()
    if not tools:
        raise InfrastructureError(f"the OpenEnv server at {url} publishes neither an action nor tools")
    return {tool.name: tool for tool in tools}


async def _step(env: OpenEnv, /, **action: Any) -> str:
    return _told(await env.act_on_server(action))


def _mcp_tool(offer: Mapping[str, Any]) -> Tool:
    return Tool.described(
        offer["name"], offer.get("description") or "", offer.get("input_schema") or {}, _caller(offer["name"])
    )


def _caller(tool: str) -> Callable[..., Awaitable[str]]:
    async def call(env: OpenEnv, /, **arguments: Any) -> str:
        seen = await env.act_on_server({"type": "call_tool", "tool_name": tool, "arguments": arguments})
        if error := seen.get("error"):
            return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
        result = seen.get("result")
        if isinstance(result, Mapping) and "data" in result:  # how an MCP client writes a result down
            result = result["data"]
        return as_text(result)

    return call


def _name(action: Mapping[str, Any]) -> str:
    """EchoAction is offered as echo."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", str(action.get("title", "")).removesuffix("Action"))
    return "_".join(words).lower() or "act"


def _told(observation: Mapping[str, Any]) -> str:
    """An observation that is one text is told as it is."""
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else as_text(observation)
