"""Coding tasks, played in real sandboxes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import InfrastructureError, Step, ToolCall, close_shared_pools, make_env
from argosy.envs.code import SHOWN, CodeEnv

TASKS = Path(__file__).parent / "tasks"
HARBOR, EXERCISM = f"harbor:{TASKS / 'harbor'}", f"directory:{TASKS / 'exercism'}"


@pytest.fixture
def play(run: Any) -> Iterator[Any]:
    """Runs a coroutine; afterwards no sandbox is left."""
    yield run
    run(close_shared_pools())


async def begin(task: str, source: str = HARBOR, **kwargs: Any) -> tuple[CodeEnv, str]:
    """An environment at the start of the named task."""
    env = make_env("argosy/code", source=source, backend="bubblewrap", **kwargs)
    assert isinstance(env, CodeEnv)
    for seed in range(len(env.tasks)):
        messages = await env.start(seed)
        if env.task.id == task:
            return env, messages[-1]["content"]
    raise AssertionError(f"no task {task}")


async def call(env: CodeEnv, name: str, **arguments: Any) -> str:
    return (await turn(env, name, **arguments)).messages[0]["content"]


async def turn(env: CodeEnv, name: str, **arguments: Any) -> Step:
    return await env.act([ToolCall(name, arguments)])


def test_an_agent_solves_a_task(play: Any) -> None:
    async def episode() -> None:
        env, opening = await begin("greeting")
        assert "greetings.txt" in opening
        assert await call(env, "bash", command="export X=3; cd /tmp") == "[no output]"
        assert await call(env, "bash", command="echo $X $PWD; false") == "3 /tmp\n[exit status 1]"
        assert await call(env, "read_file", path="names.txt", start=2) == "grace\n"
        assert await call(env, "write_file", path="greetings.txt", content="hello ada\nhello eve\n") == "ok"
        assert await call(env, "edit", path="/app/greetings.txt", old="eve", new="grace") == "ok"
        step = await turn(env, "submit")
        assert step.done and not step.truncated
        grade = await env.score()
        assert grade.reward == 1.0 and grade.parts["guard/blocked"] == 0
        await env.stop()

    play(episode())


def test_mistakes_come_back_as_text(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("greeting", max_turns=20)
        assert "No such file" in await call(env, "read_file", path="nothing.txt")
        assert "has 2 lines" in await call(env, "read_file", path="names.txt", start=9)
        assert "occurs 0 times" in await call(env, "edit", path="names.txt", old="x", new="y")
        assert "occurs 3 times" in await call(env, "edit", path="names.txt", old="a", new="y")
        assert "use write_file" in await call(env, "edit", path="names.txt", old="", new="y")
        assert "at most 300" in await call(env, "bash", command="true", timeout=1000)
        assert "took too long" in await call(env, "bash", command="sleep 20", timeout=0.3)
        assert "not a text file" in await call(env, "read_file", path="/usr/bin/env")
        assert len(await call(env, "bash", command="seq 100000")) < SHOWN + 200
        await call(env, "write_file", path="long.txt", content="ab" * SHOWN)
        assert "characters left out" in await call(env, "read_file", path="long.txt")
        assert "usage" in (await call(env, "bash")).lower()
        await env.stop()

    play(episode())


def test_parts_follow_one_another_until_one_is_not_good_enough(play: Any) -> None:
    async def episode() -> None:
        env, opening = await begin("ledger")
        assert opening.startswith("Part 1 of 2.") and "ledger.txt" in opening
        await call(env, "bash", command="printf '1\\n2\\n' >ledger.txt")
        assert (await call(env, "submit")).startswith("Part 2 of 2.")
        assert await call(env, "bash", command="ls") == "ledger.txt\nunit.txt\n"
        assert (await turn(env, "submit")).done
        grade = await env.score()
        assert grade.reward == 0.5 and (grade.parts["stage_1"], grade.parts["stage_2"]) == (1.0, 0.0)
        await env.stop()
        env, _ = await begin("ledger")
        assert (await turn(env, "submit")).done
        assert (await env.score()).reward == 0.0
        await env.stop()

    play(episode())


def test_who_runs_out_of_turns_or_time_is_graded(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("greeting", max_turns=1)
        step = await turn(env, "bash", command="sed 's/^/hello /' names.txt >greetings.txt")
        assert step.truncated and (await env.score()).reward == 1.0
        await env.stop()
        env, _ = await begin("greeting")
        env._deadline = asyncio.get_running_loop().time() + 0.2
        started = asyncio.get_running_loop().time()
        assert "took too long" in await call(env, "bash", command="sleep 60")
        assert asyncio.get_running_loop().time() - started < 10
        step = await turn(env, "bash", command="true")
        assert step.done and "time for this task is over" in step.messages[0]["content"]
        assert (await env.score()).reward == 0.0
        await env.stop()

    play(episode())


def test_who_stops_waiting_for_a_command_still_gets_a_grade(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("greeting")
        solve = "sed 's/^/hello /' names.txt >greetings.txt; sleep 30"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await turn(env, "bash", command=solve, timeout=1.5)
        assert (await env.score()).reward == 1.0
        await env.start(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await turn(env, "bash", command="sleep 30")
        started = asyncio.get_running_loop().time()
        await env.stop()
        assert asyncio.get_running_loop().time() - started < 10

    play(episode())


def test_what_a_guard_blocks_does_not_happen_and_is_counted(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("greeting")
        said = await call(env, "bash", command="mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; touch did")
        assert "blocked" in said
        assert "did" not in await call(env, "bash", command="ls")
        await turn(env, "submit")
        grade = await env.score()
        assert grade.reward == 0.0 and grade.parts["guard/blocked"] == 1.0
        await env.stop()
        env, _ = await begin("greeting", guard=False)
        assert (
            await call(env, "bash", command="mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; echo did")
            == "did\n"
        )
        await turn(env, "submit")
        assert (await env.score()).reward == 0.0
        await env.stop()

    play(episode())


def test_a_lost_sandbox_ends_the_episode_at_once(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("greeting")
        env.sandbox.kill()
        for work in (call(env, "bash", command="true"), call(env, "read_file", path="names.txt"), env.score()):
            with pytest.raises(InfrastructureError, match="sandbox"):
                await work
        await env.stop()

    play(episode())


def test_the_expert_solves_and_its_calls_can_be_replayed(play: Any) -> None:
    async def episode() -> None:
        env, _ = await begin("practice/halves", EXERCISM)
        expert, step = env.expert(None), None  # type: ignore[arg-type]
        from argosy.actors.tool_calls import parse

        checkpoint: dict[str, Any] = {}
        while step is None or not step.done:
            checkpoint = env.checkpoint()
            content, calls, error = parse(expert([]))
            step = await env.act(calls, content, error)
        assert (await env.score()).reward == 1.0
        other = CodeEnv(EXERCISM, tools=["bash", "write_file", "submit"])
        assert [schema["function"]["name"] for schema in other.tool_schemas()] == ["bash", "write_file", "submit"]
        await other.replay(checkpoint)
        await turn(other, "submit")
        assert (await other.score()).reward == 1.0
        await env.stop()
        await other.stop()

    play(episode())


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="no tool hammer"):
        CodeEnv(EXERCISM, tools=["bash", "submit", "hammer"])
    with pytest.raises(ValueError, match="must name submit"):
        CodeEnv(EXERCISM, tools=["bash"])
    with pytest.raises(ValueError, match="split must be"):
        CodeEnv(EXERCISM, split="test")
