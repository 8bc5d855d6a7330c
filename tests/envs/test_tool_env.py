"""An episode through the async half and through the plain Gymnasium half."""

import json
import warnings
from typing import Any

import pytest
from argosy.envs import (
    Grade,
    InfrastructureError,
    InvalidGrade,
    SandboxPool,
    ToolCall,
    ToolEnv,
    ToolError,
    UnknownEnvironment,
    make_env,
    register,
    tool,
)
from gymnasium.utils.env_checker import check_env


class Count(ToolEnv):
    """Reach a number."""

    system = "You count."
    max_turns = 4

    def __init__(self, top: int = 9):
        self.top = top
        self.closed = 0

    def setup(self, seed: int, options: dict[str, Any]) -> str:
        self.goal, self.value = seed % self.top, 0
        return f"Reach {self.goal}."

    @tool
    def add(self, amount: int) -> int:
        """Add to the number."""
        if amount < 0:
            raise ToolError("only upwards")
        self.value += amount
        self.add_reward(0.1)
        return self.value

    @tool
    async def submit(self) -> None:
        """Say that the number is reached."""
        self.finish()

    def grade(self) -> Grade:
        right = float(self.value == self.goal)
        return Grade(right, {"right": right})

    def close_episode(self) -> None:
        self.closed += 1


class InSandbox(Count):
    """The same, with a sandbox of the shared pool: setup and tools are async."""

    async def setup(self, seed: int, options: dict[str, Any]) -> str:  # type: ignore[override]
        self.pool = SandboxPool.shared(size=2)
        self.sandbox = await self.pool.acquire()
        return super().setup(seed, options)

    @tool
    async def shell(self, command: str) -> str:
        """Run a command."""
        return (await self.sandbox.exec(command, timeout=5)).output

    async def close_episode(self) -> None:  # type: ignore[override]
        await self.pool.release(self.sandbox)


def test_an_episode(run: Any) -> None:
    async def body() -> None:
        env = Count()
        opening = [{"role": "system", "content": "You count."}, {"role": "user", "content": "Reach 2."}]
        assert await env.start(11) == opening
        step = await env.act([ToolCall("add", {"amount": 1}), ToolCall("add", {"amount": 1})])
        assert step.messages == [{"role": "tool", "name": "add", "content": text} for text in "12"]
        assert (step.done, step.reward) == (False, 0.2)
        step = await env.act([ToolCall("submit", {}), ToolCall("add", {"amount": 1})])
        assert [m["content"] for m in step.messages] == ["ok"], "nothing runs after the end"
        assert step.done and not step.truncated
        assert await env.score() == Grade(1.0, {"right": 1.0})
        with pytest.raises(RuntimeError, match="call start"):
            await env.act(None, "more")
        await env.stop()
        await env.stop()
        assert env.closed == 1

    run(body())


def test_the_models_mistakes_come_back_as_text_and_turns_always_end(run: Any) -> None:
    async def body() -> None:
        env = Count()
        await env.start(5)
        texts = []
        for calls, error in (
            ([ToolCall("add", {"amount": "x"}), ToolCall("plus", {}), ToolCall("add", {"amount": -1})], None),
            (None, None),
            (None, "the call is not valid JSON"),
        ):
            step = await env.act(calls, "hm", error)
            assert not step.done
            texts += [(m["role"], m["content"]) for m in step.messages]
        step = await env.act([])
        assert step.done and step.truncated
        assert texts[0][1].startswith("Error: amount: input should be a valid integer")
        assert texts[1] == ("tool", "Error: no tool 'plus'. Tools: add(amount: int), submit()")
        assert texts[2] == ("tool", "Error: only upwards")
        assert texts[3] == ("user", "Error: no tool call found. Tools: add(amount: int), submit()")
        assert texts[4] == ("tool", "Error: the call is not valid JSON")
        assert (await env.score()).reward == 0.0

    run(body())


def test_infrastructure_failures_are_not_hidden_from_the_loop(run: Any) -> None:
    class Broken(Count):
        @tool
        def read(self) -> str:
            """Read."""
            raise InfrastructureError("the disk is full")

    async def body() -> None:
        env = Broken()
        await env.start(0)
        with pytest.raises(InfrastructureError, match="disk is full"):
            await env.act([ToolCall("read", {})])

    run(body())


def test_a_grade_is_one_finite_number(run: Any) -> None:
    class Unsure(Count):
        def grade(self) -> Any:
            return self.answer

    async def body() -> None:
        env = Unsure()
        for env.answer in (None, 1.0, "1"):
            await env.start(0)
            with pytest.raises(InvalidGrade, match="must return a Grade"):
                await env.score()

    run(body())
    for bad in (float("nan"), float("inf"), "1.0", None):
        with pytest.raises(InvalidGrade, match="one finite number"):
            Grade(bad)
        with pytest.raises(InvalidGrade, match="part must be"):
            Grade(1.0, {"part": bad})


@pytest.mark.parametrize("kind", [Count, InSandbox])
def test_gymnasium_accepts_it(kind: type[Count]) -> None:
    env = kind()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a spec.*|.*not having a spec.*")
        check_env(env)
    env.close()


def test_stepping_by_hand(processes_with: Any) -> None:
    env = InSandbox(top=4)
    text, info = env.reset(seed=7)
    assert text == "You count.\nReach 3." and info["tools"] == env.tool_schemas()
    observation, reward, terminated, truncated, _ = env.step('{"name": "shell", "arguments": {"command": "pwd"}}')
    assert (observation, reward, terminated, truncated) == ("/workspace\n", 0.0, False, False)
    both = [{"name": "add", "arguments": {"amount": 3}}, {"name": "submit"}]
    observation, reward, terminated, truncated, info = env.step(json.dumps(both))
    assert (observation, reward, terminated, truncated) == ("3\nok", 1.1, True, False)
    assert info["parts"] == {"right": 1.0}
    env.close()
    env.close()


def test_the_same_seed_is_the_same_episode_and_none_draws_one(run: Any) -> None:
    env = Count(top=10**6)
    assert run(env.start(3)) == run(env.start(3))
    assert run(env.start()) != run(env.start())


def test_environments_by_name() -> None:
    register("test/count", Count, top=5)
    first = make_env("test/count")
    assert isinstance(first, Count) and first.top == 5
    second = make_env("test/count", top=7)
    assert isinstance(second, Count) and second.top == 7
    with pytest.raises(UnknownEnvironment, match="did you mean 'test/count'"):
        make_env("test/cuont")
    with pytest.raises(UnknownEnvironment, match="cannot import"):
        make_env("no.such:Env")
    with pytest.raises(UnknownEnvironment, match="has no 'Env'"):
        make_env("argosy.envs:Env")
    with pytest.raises(UnknownEnvironment, match="not a ToolEnv"):
        make_env("builtins:dict")


def test_names_a_user_chooses_do_not_collide_with_ours() -> None:
    class Counting(ToolEnv):
        _turns = _run = _grade = _finished = "mine"

        def setup(self, seed: int, options: dict[str, Any]) -> str:
            return "go"

        @tool
        def stop_here(self) -> str:
            """End."""
            self.finish()
            return "bye"

        def grade(self) -> Grade:
            return Grade(1.0)

    env = Counting()
    env.reset(seed=0)
    assert env.step('{"name": "stop_here", "arguments": {}}')[1:3] == (1.0, True)
    assert (env._turns, env._run, env._grade, env._finished) == ("mine",) * 4
    env.close()
