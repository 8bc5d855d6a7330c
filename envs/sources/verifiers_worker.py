"""Answers about one verifiers taskset, a line of JSON each; runs in an interpreter that has verifiers.

Invariant: it imports nothing of Argosy, so verifiers may live where its dependencies do. Everybody's output but the
answers goes to standard error. It ends when its questions do.

A conversation is recorded in a verifiers `Trace` as its own rollouts are, so that stops, metrics and rewards find what
they expect; tools are called in this process. What needs a machine, or several agents, is refused before it begins.
"""

import asyncio
import contextvars
import inspect
import itertools
import json
import os
import sys
import uuid
from typing import Any

current: contextvars.ContextVar[Any] = contextvars.ContextVar("session")


class Refused(Exception):
    """The taskset asks for more than can be had here; the text says what."""


class Source:
    """The taskset, its tools, and the tasks read so far."""

    async def describe(self, taskset: str, config: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf
        from verifiers.v1.session import hook_boundary
        from verifiers.v1.utils import loaders
        from verifiers.v1.utils.decorators import discover_decorated

        settings = loaders.taskset_config_type(taskset).model_validate({"id": taskset, **config})
        self.set = loaders.load_taskset(settings)
        kind = self.set.task_type()
        if loaders.environment_class(taskset) is not vf.SingleAgentEnv:
            raise Refused(f"{taskset} brings an environment of several agents; only one can be played")
        if kind.NEEDS_CONTAINER:
            raise Refused(f"the tasks of {taskset} need a container")
        self._more, self.tasks = iter(self.set), list[Any]()
        count = len(self._all()) if self.set.bounded else None
        task = self.task(0)
        needy = [
            hook.__name__
            for name in ("reward", "metric")
            for hook in task.hooks(name)
            if (p := inspect.signature(hook).parameters.get("runtime")) and p.default is inspect.Parameter.empty
        ]
        if needy:
            raise Refused(f"{', '.join(needy)} of {taskset} need a machine (runtime)")
        if discover_decorated(task, "intercept") or any(
            hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in task.hooks("stop")
        ):
            raise Refused(f"{taskset} changes or stops single requests; only stops on a Trace can be played")
        self.shared = list(self.set.toolsets(settings))
        for toolset in self.shared:
            await toolset.setup()
        offers = [
            {"name": name, "description": offer.description or "", "parameters": offer.input_schema}
            for name, (_, offer) in (await offered([*self.shared, *kind.toolsets(settings.task)])).items()
        ]
        self.offers = [vf.Tool.model_validate(offer) for offer in offers]
        return {"count": count, "tools": offers}

    def task(self, index: int) -> Any:
        self.tasks += itertools.islice(self._more, max(0, index + 1 - len(self.tasks)))
        if index >= len(self.tasks):
            raise Refused(f"there is no task {index}: the taskset has {len(self.tasks)}")
        return self.tasks[index]

    def _all(self) -> list[Any]:
        self.tasks += self._more
        return self.tasks


class Session:
    """One conversation about one task."""

    def __init__(self, source: Source, index: int):
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls
        from verifiers.v1.types import content_text

        self.source, self.task = source, source.task(index)
        data = self.task.data
        self.trace = vf.Trace(
            task=vf.TraceTask(type=type(self.task).__name__, data=data, key=self.task.key, hash=self.task.hash),
            state=state_cls(type(self.task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        if data.prompt is None:
            raise Refused("a task without a prompt needs somebody to open the conversation")
        self.messages: list[Any] = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        self.messages += [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        self.opening = [{"role": message.role, "content": content_text(message.content)} for message in self.messages]
        self.calls: list[str] = []

    async def open(self) -> dict[str, Any]:
        from verifiers.v1.utils.decorators import invoke

        await invoke(self.task.setup, {"trace": self.trace, "runtime": NoMachine()})
        own = self.task.toolsets(self.task.config)
        for toolset in own:
            await toolset.setup()
            await toolset.setup_task(self.task.data)
        self.tools = await offered([*self.source.shared, *own])
        return {"id": self.task.data.name or self.task.data.id or "", "messages": self.opening}

    async def say(self, content: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The model's turn."""
        import verifiers.v1 as vf
        from verifiers.v1.graph import prepare_turn

        made = [
            vf.ToolCall(id=uuid.uuid4().hex, name=call["name"], arguments=json.dumps(call["arguments"]))
            for call in calls
        ]
        self.calls = [call.id for call in made]
        message = vf.AssistantMessage(content=content, tool_calls=made or None)
        reason = "tool_calls" if made else "stop"
        response = vf.Response(id=uuid.uuid4().hex, created=0, model="", message=message, finish_reason=reason)
        prepare_turn(self.trace, self.messages, self.source.offers).commit(response)
        self.messages = [*self.messages, message]
        return {}

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        server, offer = self.tools[name]
        token = current.set(self)
        try:
            result: Any = await server.call_tool(offer.name, arguments)
        except Exception as error:  # as over MCP: what a tool raises is for the model to read
            return {"error": str(error)}
        finally:
            current.reset(token)
        text = "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        return {"error": text} if result.is_error else {"text": text}

    async def hear(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What the model is answered; the name of the stop that ends the conversation, if one does."""
        import verifiers.v1 as vf
        from verifiers.v1.utils.decorators import invoke

        for call, message in itertools.zip_longest(self.calls, messages):
            if call is not None and message is not None:
                self.messages.append(
                    vf.ToolMessage(tool_call_id=call, content=message["content"], name=message["name"])
                )
            elif message is not None:
                self.messages.append(vf.UserMessage(content=message["content"]))
        for stop in self.task.hooks("stop"):
            answer = invoke(stop, {vf.Trace: self.trace, "trace": self.trace})
            if await answer if inspect.isawaitable(answer) else answer:
                self.trace.stop(stop.__name__)
                return {"stop": stop.__name__}
        return {"stop": None}

    async def score(self) -> dict[str, Any]:
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.utils.decorators import invoke

        prepare_turn(self.trace, self.messages, self.source.offers).commit_prompt()
        await invoke(self.task.finalize, {"trace": self.trace, "runtime": NoMachine()})
        await self.task.score(self.trace)
        missing = [name for name, reward in self.trace.rewards.items() if reward is None]
        if missing or not self.trace.rewards:
            raise Refused(f"no reward was given{': ' if missing else ''}{', '.join(missing)}")
        parts = {name: reward.score for name, reward in self.trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in self.trace.metrics.items() if value is not None}
        return {"reward": self.trace.reward, "parts": {**metrics, **parts}}


class NoMachine:
    """Stands where a task may look for the machine it runs on."""

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"the task wants a machine (runtime.{name}), which it cannot have here")


async def offered(toolsets: list[Any]) -> dict[str, Any]:
    """Their tools by the name that a model sees, each with the server that calls it."""
    from mcp.server.mcpserver import MCPServer

    found = {}
    for toolset in toolsets:
        toolset._pull_state, toolset._push_state = _state, _keep
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for offer in await server.list_tools():
            name = f"{toolset.server_name}_{offer.name}" if toolset.server_name else offer.name
            found[name] = (server, offer)
    return found


async def _state() -> Any:
    """Of the conversation whose call this is; tools change it in place, so there is nothing to hand back."""
    return current.get().trace.state


async def _keep(before: bytes) -> None:
    return None


async def answer(source: Source, sessions: dict[str, Session], question: dict[str, Any]) -> dict[str, Any]:
    do, session = question.pop("do"), question.pop("session", None)
    if do == "describe":
        return await source.describe(**question)
    if do == "key":
        return {"key": source.task(question["index"]).key}
    if do == "open":
        opened = sessions[session] = Session(source, question["index"])
        return await opened.open()
    if do == "close":
        sessions.pop(session, None)
        return {}
    answered: dict[str, Any] = await getattr(sessions[session], do)(**question)
    return answered


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    source, sessions, running = Source(), dict[str, Session](), set[asyncio.Task[None]]()

    async def respond(number: int, question: dict[str, Any]) -> None:
        try:
            said = {"number": number, "answer": await answer(source, sessions, question)}
        except Exception as error:
            name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            said = {"number": number, "error": f"{name}{error}", "missing": getattr(error, "name", None)}
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    while line := await asyncio.to_thread(sys.stdin.readline):
        question = json.loads(line)
        task = asyncio.create_task(respond(question.pop("number"), question))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # nobody waits for what is still running


if __name__ == "__main__":
    asyncio.run(main())
