"""The world as an agent sees it: an opening message, tools, an end, a grade.

Invariant: an episode is `start`, then `act` until it says done, then `score` once, then `stop`; every turn of the model
is counted here, also one with a malformed or missing call, so `max_turns` always ends an episode. The model's mistakes
come back as text; exceptions are bugs or `InfrastructureError`, never a reward.

A user writes `setup`, tools and `grade`. The episode loop uses the async half; `reset` and `step` are the same
episode as a plain `gymnasium.Env` for whoever wants to step it by hand.

The state of an episode is its seed and what the model did: `checkpoint` says it as JSON, and `replay` brings another
object there, in any process, or says where it answers differently.
"""

import asyncio
import inspect
import json
import math
import numbers
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gymnasium

from .errors import InvalidGrade, ReplayDiffers, ToolError
from .sandboxes import close_shared_pools
from .tools import Tool, ToolCall, as_text, is_tool

T = TypeVar("T")
Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}; "name" on a tool's answer."""
Opening = str | list[Message]

_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
_LONGEST_TEXT = 1_000_000


@dataclass(frozen=True)
class Step:
    """What one turn of the model led to. `truncated` says that the turns ran out, not that the agent finished."""

    messages: list[Message]
    done: bool
    reward: float = 0.0
    truncated: bool = False


@dataclass(frozen=True)
class Grade:
    """The final reward and what it is made of, e.g. `Grade(1.0, {"hidden_tests": 1.0})`."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.parts}.items():
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise InvalidGrade(f"{name} must be one finite number, not {value!r}")


class AnyText(gymnasium.spaces.Text):
    """Text of any characters (the stock space rejects spaces, newlines and ""); samples are printable ASCII."""

    def __init__(self, max_length: int, sample_length: int = 80):
        super().__init__(max_length=max_length, min_length=0, charset=_PRINTABLE)
        self.sample_length = sample_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(self.sample_length + 1))
        return "".join(self.np_random.choice(self.character_list, size=length))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class ToolEnv(gymnasium.Env[str, str]):
    """Subclass it: `setup`, some `@tool` methods, `grade`. One object lives through one episode at a time."""

    system: str = ""
    """The system message; a property works too. Empty: none."""

    max_turns: int = 16
    """The episode is truncated (and graded) after this many turns of the model."""

    replayable: bool = True
    """Whether the same calls always give the same answers; if not, an interrupted episode starts over."""

    tools: dict[str, Tool] = {}
    metadata: dict[str, Any] = {"render_modes": []}
    observation_space: gymnasium.Space[str] = AnyText(_LONGEST_TEXT)
    action_space: gymnasium.Space[str] = AnyText(_LONGEST_TEXT)

    # Mangled names: a user's own `_run` or `_turns` must not collide with ours.
    __begun: dict[str, Any] = {}
    __turns: list[dict[str, Any]] = []
    __running = False
    __finished = False
    __turn_reward = 0.0
    __grade: Grade | None = None
    __runner: asyncio.Runner | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
        cls.tools = {name: Tool.of(member) for name, member in members.items() if is_tool(member)}

    # What a user writes. Each may be `async def` or `def`.

    def setup(self, seed: int, options: dict[str, Any]) -> Opening | Awaitable[Opening]:
        """Build the world for this seed, and nothing but this seed; return the opening user message (or several
        messages, of a conversation that has begun)."""
        raise NotImplementedError(f"{type(self).__name__} must define setup(seed, options)")

    def grade(self) -> Grade | Awaitable[Grade]:
        """Judge the finished episode, out of the agent's reach. The episode loop calls it through `score`."""
        raise NotImplementedError(f"{type(self).__name__} must define grade()")

    def reply(self, content: str) -> str | Awaitable[str]:
        """Answer a turn without a tool call; the default asks for one. Call `self.finish()` to accept it as the end."""
        return f"Error: no tool call found. {self.__offer()}"

    def close_episode(self) -> Awaitable[None] | None:
        """Give back what `setup` took."""
        return None

    def expert(self, rng: Any) -> Any:
        """Optional: a scripted policy for the current episode, `(messages) -> assistant text`, for demonstrations."""
        raise NotImplementedError(f"{type(self).__name__} offers no scripted expert")

    # What tools may call.

    def finish(self) -> None:
        """End the episode after the current tool."""
        self.__finished = True

    def add_reward(self, value: float) -> None:
        """Reward the current turn, besides the final grade."""
        if not math.isfinite(value):
            raise InvalidGrade(f"add_reward takes one finite number, not {value!r}")
        self.__turn_reward += value

    # What the episode loop calls.

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's function format, in the order of their definition."""
        return [tool.schema for tool in self.tools.values()]

    async def start(self, seed: int | None = None, options: dict[str, Any] | None = None) -> list[Message]:
        """Begin an episode (ending the one before); the same seed gives the same episode."""
        await self.stop()
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        self.__begun, self.__turns = {}, []
        self.__finished, self.__grade, self.__running = False, None, True
        opening: Opening = await _resolve(self.setup(seed, dict(options or {})))
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        said = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        messages = [*system, *said]
        self.__begun = {"seed": seed, "options": dict(options or {}), "opening": messages}
        return messages

    async def act(self, calls: Sequence[ToolCall] | None, content: str = "", error: str | None = None) -> Step:
        """One turn of the model: its tool calls in order, its text, or the `error` that kept it from being parsed."""
        if not self.__running or self.__finished or len(self.__turns) >= self.max_turns:
            raise RuntimeError("the episode is over or was never started: call start() first")
        self.__turn_reward = 0.0
        messages: list[Message] = []
        said = None if calls is None else [{"name": call.name, "arguments": call.arguments} for call in calls]
        self.__turns.append({"calls": said, "content": content, "error": error, "messages": messages})
        if error is not None:
            messages.append({"role": "tool", "content": f"Error: {error}"})
        elif not calls:
            messages.append({"role": "user", "content": await _resolve(self.reply(content))})
        for call in calls or () if error is None else ():
            messages.append({"role": "tool", "name": call.name, "content": await self.__run(call)})
            if self.__finished:
                break
        truncated = not self.__finished and len(self.__turns) >= self.max_turns
        return Step(messages, self.__finished or truncated, self.__turn_reward, truncated)

    async def score(self) -> Grade:
        """The grade, computed once per episode; `InvalidGrade` when `grade` gave something else."""
        if self.__grade is None:
            grade = await _resolve(self.grade())
            if not isinstance(grade, Grade):
                raise InvalidGrade(f"{type(self).__name__}.grade() must return a Grade, not {grade!r}")
            self.__grade = grade
        return self.__grade

    async def stop(self) -> None:
        """End the episode and give back what it held; safe to call at any time and twice."""
        if self.__running:
            self.__running = False
            await _resolve(self.close_episode())

    def checkpoint(self) -> dict[str, Any]:
        """The episode up to now, fit for JSON: how it began, and each turn with what it was answered."""
        return {**self.__begun, "turns": [dict(turn) for turn in self.__turns]}

    async def replay(self, checkpoint: Mapping[str, Any]) -> None:
        """Begin again and do what the checkpoint tells; `ReplayDiffers` at the first answer that is not the same."""
        opening = await self.start(checkpoint["seed"], checkpoint["options"])
        if opening != checkpoint["opening"]:
            raise ReplayDiffers(f"the opening was {checkpoint['opening']} and is now {opening}")
        for number, turn in enumerate(checkpoint["turns"], 1):
            calls = None if turn["calls"] is None else [ToolCall(**call) for call in turn["calls"]]
            step = await self.act(calls, turn["content"], turn["error"])
            if step.messages != turn["messages"]:
                raise ReplayDiffers(f"turn {number} was answered {turn['messages']} and is now {step.messages}")

    async def __run(self, call: ToolCall) -> str:
        tool = self.tools.get(call.name)
        if tool is None:
            return f"Error: no tool {call.name!r}. {self.__offer()}"
        try:
            arguments = tool.bind(call.arguments)
            return as_text(await _resolve(tool.function(self, **arguments)))
        except ToolError as error:
            return f"Error: {error}"

    def __offer(self) -> str:
        return "Tools: " + ", ".join(tool.signature for tool in self.tools.values())

    # The same episode, stepped by hand.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        messages = self.__wait(self.start(seed, options))
        return _join(messages), {"messages": messages, "tools": self.tool_schemas()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`action` is `{"name": ..., "arguments": {...}}` or a list of those as JSON; other text is plain content."""
        calls = parse_action(action)
        step = self.__wait(self.act(calls, action))
        reward, info = step.reward, dict[str, Any](messages=step.messages)
        if step.done:
            grade = self.__wait(self.score())
            reward += grade.reward
            info["parts"] = dict(grade.parts)
        return _join(step.messages), reward, step.done and not step.truncated, step.truncated, info

    def close(self) -> None:
        if self.__runner is not None:
            self.__wait(self.__close_all())
            self.__runner.close()
            self.__runner = None

    async def __close_all(self) -> None:
        await self.stop()
        await close_shared_pools()

    def __wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in an event loop of this object's own, which its sandboxes stay bound to from call to call."""
        if self.__runner is None:
            self.__runner = asyncio.Runner()
        return self.__runner.run(work)


def parse_action(action: str) -> list[ToolCall]:
    """Tool calls written as JSON by hand; empty when the text is anything else."""
    try:
        found = json.loads(action)
    except ValueError:
        return []
    items = found if isinstance(found, list) else [found]
    if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        return []
    return [ToolCall(item["name"], item.get("arguments", {})) for item in items]


def _join(messages: list[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


async def _resolve(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
