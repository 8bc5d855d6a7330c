"""Against real servers, made with OpenEnv's own helper, in an interpreter of their own."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import InfrastructureError, ToolCall, make_env
from argosy.envs.sources import openenv

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install the servers

HERE = Path(__file__).parent


def guess(number: Any, **more: Any) -> list[ToolCall]:
    return [ToolCall("guess_number", {"number": number, **more})]


@pytest.fixture(scope="module")
def server(neighbours: Path) -> Iterator[Callable[[str], list[str]]]:
    yield lambda name: [str(neighbours), str(HERE / name), "{port}"]
    for started in openenv._servers.values():
        started.stop()


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    """Of the guessing server, once it is there."""
    make_env("argosy/openenv", command=server("openenv_guess.py")).tool_schemas()
    return next(iter(openenv._servers.values())).url


def test_an_episode(run: Any, server: Any) -> None:
    async def body() -> None:
        env = make_env("argosy/openenv", command=server("openenv_guess.py"), system="Guess.")
        (schema,) = env.tool_schemas()
        assert schema["function"]["name"] == "guess_number" and schema["function"]["description"] == "Guess the number."
        parameters = schema["function"]["parameters"]
        assert list(parameters["properties"]) == parameters["required"] == ["number"]
        assert await env.start(13) == [
            {"role": "system", "content": "Guess."},
            {"role": "user", "content": "below 10"},
        ]
        step = await env.act(guess(1))
        assert step.messages == [{"role": "tool", "name": "guess_number", "content": "no"}]
        assert (step.done, step.reward) == (False, -0.1)
        step = await env.act([*guess(-1), *guess("x", y=1)])
        assert [message["content"][:29] for message in step.messages] == ["Error: number: Input should b"] * 2
        step = await env.act(guess(3))
        assert step.done and step.reward == 0.0
        assert (await env.score()).reward == 1.0
        other = make_env("argosy/openenv", url=env.url, system="Guess.")
        await other.replay(env.checkpoint())
        assert (await other.score()).reward == 1.0
        await env.stop()
        await other.stop()

    run(body())


def test_tools_of_an_mcp_world(run: Any, server: Any) -> None:
    async def body() -> None:
        env = make_env("argosy/openenv", command=shlex.join(server("openenv_notes.py")))
        assert [schema["function"]["name"] for schema in env.tool_schemas()] == ["note"]
        await env.start(0)
        step = await env.act([ToolCall("note", {"text": text}) for text in ("a", "b", "")])
        assert [m["content"] for m in step.messages] == [
            "1 notes",
            "2 notes",
            "Error: Error calling tool 'note': empty",
        ]
        await env.start(1)
        assert (await env.act([ToolCall("note", {"text": "a"})])).messages[0]["content"] == "1 notes"
        await env.stop()

    run(body())


def test_whoever_finds_the_server_full_waits(run: Any, url: str) -> None:
    async def body() -> None:
        envs = [make_env("argosy/openenv", url=url, seconds=20) for _ in range(4)]

        async def play(env: Any, seed: int) -> float:
            await env.start(seed)
            await asyncio.sleep(0.3)
            await env.act(guess(seed))
            reward = (await env.score()).reward
            await env.stop()
            return reward

        assert await asyncio.gather(*(play(env, seed) for seed, env in enumerate(envs))) == [1.0] * 4
        await envs[0].start(0)
        await envs[1].start(0)
        full = make_env("argosy/openenv", url=url, seconds=0.5)
        with pytest.raises(InfrastructureError, match=r"has no free session .*max_concurrent_envs"):
            await full.start(0)
        for env in envs[:2]:
            await env.stop()

    run(body())


def test_a_broken_world_is_nobodys_merit(run: Any, url: str) -> None:
    async def body() -> None:
        env = make_env("argosy/openenv", url=url, seconds=1.0)
        await env.start(0)
        with pytest.raises(InfrastructureError, match="failed in step: EXECUTION_ERROR: the world has broken"):
            await env.act(guess(100))
        await env.start(0)
        with pytest.raises(InfrastructureError, match="did not answer step within 1 s"):
            await env.act(guess(200))
        with pytest.raises(InfrastructureError, match="is over"):
            await env.act(guess(0))
        await env.stop()
        over = make_env("argosy/openenv", url=url, reset={"most": 1})
        with pytest.raises(InfrastructureError, match="seed 0 is over at once"):
            await over.start(0)
        await over.stop()

    run(body())


def test_validation_begins_worlds_twice(run: Any, url: str) -> None:
    async def found(**reset: Any) -> set[str | None]:
        return {check.problem async for check in make_env("argosy/openenv", url=url, reset=reset).validate(2)}

    assert run(found()) == {None}
    assert run(found(most=1)) == {"does not begin"}
    assert run(found(most=2)) == {"flaky"}


def test_a_server_that_dies_ends_the_episode_and_the_next_has_another(run: Any, server: Any) -> None:
    async def body() -> None:
        env = make_env("argosy/openenv", command=server("openenv_guess.py"))
        await env.start(4)
        with pytest.raises(InfrastructureError, match=r"closed the connection in step|is lost in step"):
            await env.act(guess(300))
        await env.stop()
        await env.start(4)
        assert (await env.act(guess(4))).done
        await env.stop()

    run(body())


def test_complaints_name_cause_and_fix(run: Any) -> None:
    with pytest.raises(InfrastructureError, match=r"no OpenEnv server answers at http://127.0.0.1:9"):
        run(make_env("argosy/openenv", url="http://127.0.0.1:9").start(0))
    with pytest.raises(InfrastructureError, match=r"server \"python3 .* ended with 7. It said: no luck"):
        code = "import sys; print('no luck'); sys.exit(7)  # {port}"
        run(make_env("argosy/openenv", command=["python3", "-c", code]).start(0))
    with pytest.raises(ValueError, match=r"as \{port\}"):
        make_env("argosy/openenv", command="serve")
    with pytest.raises(ValueError, match="either the url"):
        make_env("argosy/openenv")


def test_a_server_does_not_outlive_a_killed_owner(server: Any, processes_with: Any, eventually: Any) -> None:
    mark = f"owner-{os.getpid()}-{time.time_ns()}"
    command = [*server("openenv_guess.py"), mark]
    code = f"from argosy.envs import make_env; make_env('argosy/openenv', command={command!r}).tool_schemas(); input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    eventually(lambda: any("openenv_guess" in line and "make_env" not in line for line in processes_with(mark)), 60)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    eventually(lambda: not processes_with(mark))
