"""An episode through the async half and through the plain Gymnasium half."""

import json
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from argosy.envs import (
    Grade,
    InfrastructureError,
    InvalidGrade,
    ReplayDiffers,
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
    with pytest.raises(InvalidGrade, match="add_reward takes one finite number"):
        Count().add_reward(float("inf"))
    for bad in (float("nan"), float("inf"), "1.0", None):
        with pytest.raises(InvalidGrade, match="one finite number"):
            Grade(bad)
        with pytest.raises(InvalidGrade, match="part must be"):
            Grade(1.0, {"part": bad})


@pytest.mark.parametrize("kind", [Count, InSandbox])
def test_gymnasium_accepts_it_without_a_warning(kind: type[Count]) -> None:
    register(f"test/{kind.__name__}", kind, top=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(f"test/{kind.__name__}", top=7)
        assert env.unwrapped.top == 7  # type: ignore[attr-defined]
        text, info = env.reset(seed=3)
        assert text.endswith("Reach 3.") and len(info["tools"]) == len(env.unwrapped.tools)  # type: ignore[attr-defined]
        assert env.step('{"name": "add", "arguments": {"amount": 2}}')[:2] == ("2", 0.1)
        check_env(env.unwrapped)
        env.close()


def test_a_checkpoint_is_gone_on_from_elsewhere(run: Any) -> None:
    async def body() -> None:
        env = Count()
        await env.start(11, {"kind": "any"})
        await env.act([ToolCall("add", {"amount": 1}), ToolCall("add", {"amount": -1})])
        await env.act(None, "hm", "the call is not valid JSON")
        await env.act([], "well")
        checkpoint = json.loads(json.dumps(env.checkpoint()))
        assert [len(turn["messages"]) for turn in checkpoint["turns"]] == [2, 1, 1]
        other = Count()
        await other.replay(checkpoint)
        assert other.value == 1 and other.checkpoint() == env.checkpoint() == checkpoint
        step = await other.act([ToolCall("add", {"amount": 1}), ToolCall("submit", {})])
        assert step.done and (await other.score()).reward == 1.0
        with pytest.raises(ReplayDiffers, match=r"the opening was .*Reach 2.* is now .*Reach 1\."):
            await Count(top=10).replay(checkpoint)
        checkpoint["turns"][0]["messages"][0]["content"] = "5"
        with pytest.raises(ReplayDiffers, match=r"turn 1 was answered .*'5'.* is now .*'1'"):
            await other.replay(checkpoint)

    run(body())


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
    with pytest.raises(
        UnknownEnvironment, match=r"FrozenLakeEnv, not a ToolEnv: give it tools with argosy.envs.TextGame"
    ):
        make_env("FrozenLake-v1")


def test_environments_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("TOP = 3\n")
    (tmp_path / "mine.py").write_text(
        "from beside_it import TOP\n"
        "from argosy.envs import Grade, ToolEnv\n"
        "class Mine(ToolEnv):\n"
        "    top = TOP\n"
        "    def setup(self, seed, options):\n"
        "        return 'go'\n"
        "    def grade(self):\n"
        "        return Grade(0.0)\n"
    )
    (tmp_path / "two.py").write_text(
        "from argosy.envs import ToolEnv\nclass A(ToolEnv): ...\nclass B(ToolEnv): ...\nDATA = {}\n"
    )
    monkeypatch.chdir(tmp_path)
    env = make_env("./mine.py:Mine")
    assert env.reset(seed=0)[0] == "go" and env.top == 3  # type: ignore[attr-defined]
    assert type(make_env("mine.py")) is type(make_env(f"{tmp_path}/mine.py")) is type(env), "executed once"
    for name, why in (
        ("two.py", "must define one ToolEnv or be given with one; its environments are A, B"),
        ("two.py:C", "has no 'C'; its environments are A, B"),
        ("two.py:DATA", "dict"),
        ("three.py", "there is no file .*three.py"),
        ("beside_it.py", "it defines no ToolEnv"),
    ):
        with pytest.raises((UnknownEnvironment, TypeError), match=why):
            make_env(name)


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
