"""Real tasksets of verifiers, in an interpreter of their own. Importing it takes seconds, so few processes do."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import Grade, InfrastructureError, ToolCall, make_env
from argosy.envs.sources import verifiers

SUMS = {"count": 40, "flaky": 17}
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install verifiers


@pytest.fixture(scope="module")
def play(neighbours: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield lambda taskset, **kwargs: make_env("argosy/verifiers", taskset=taskset, python=str(neighbours), **kwargs)
    for worker in verifiers._workers.values():
        worker.stop()


def add(text: str, **more: Any) -> list[ToolCall]:
    return [ToolCall("notes_add", {"text": text, **more})]


def test_one_turn_and_splits(run: Any, play: Any) -> None:
    async def body() -> None:
        env = play("verifiers-sums", config=SUMS)
        assert env.tool_schemas() == []
        opening = await env.start(3)
        number = int(opening[1]["content"].partition("+")[0])
        assert opening == [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"{number}+{number}?"},
        ]
        assert env.task == f"verifiers-sums/{number}"
        step = await env.act(None, f" {2 * number}\n")
        assert step.done and not step.truncated
        assert await env.score() == Grade(1.0, {"right": 1.0})
        again = play("verifiers-sums", config=SUMS)
        await again.replay(env.checkpoint())
        assert (await again.score()).reward == 1.0
        await again.start(3)
        await again.act(None, "no idea")
        assert (await again.score()).reward == 0.0
        await again.stop()
        seen = {}
        for split in ("train", "held_out"):
            env = play("verifiers-sums", config=SUMS, split=split)
            seen[split] = {(await env.start(seed))[1]["content"] for seed in range(40)}
            await env.stop()
        assert seen["train"] and seen["held_out"] and not seen["train"] & seen["held_out"]

    run(body())


def test_tools_state_and_stops(run: Any, play: Any) -> None:
    async def body() -> None:
        env, other = play("verifiers-notes"), play("verifiers-notes")
        (schema,) = env.tool_schemas()
        assert schema["function"]["name"] == "notes_add" and schema["function"]["description"] == "Write a note."
        assert schema["function"]["parameters"]["required"] == ["text"]
        assert await env.start(3) == [{"role": "user", "content": "task 3"}] and env.task == "note 3"
        await other.start(4)
        step = await env.act([*add("a"), *add("bad")])
        assert [message["content"] for message in step.messages] == [
            "2 notes for task 3",
            "Error: Error executing tool add: not that",
        ]
        assert (await other.act(add("x"))).messages[0]["content"] == "2 notes for task 4", "states are apart"
        assert "Field required" in (await env.act([ToolCall("notes_add", {})])).messages[0]["content"]
        assert "no tool 'nope'" in (await env.act([ToolCall("nope", {})])).messages[0]["content"]
        assert not (await env.act(None, "{", error="not valid JSON")).done
        step = await env.act(add("b", times=4))
        assert step.done and not step.truncated, "its own stop ends it"
        assert await env.score() == Grade(12.0, {"count": 6.0, "turns": 5.0, "answers": 5.0})
        await other.act(None, "done")
        assert await other.score() == Grade(4.0, {"count": 2.0, "turns": 2.0, "answers": 1.0})
        await env.stop()
        await other.stop()

    run(body())


def test_a_process_that_hangs_or_dies_is_nobodys_merit(run: Any, play: Any) -> None:
    async def body() -> None:
        env, beside = play("verifiers-notes"), play("verifiers-notes")
        await env.start(0)
        await beside.start(1)
        env.seconds = 3.0
        with pytest.raises(InfrastructureError, match="did not call within 3 s"):
            await env.act(add("hang"))
        await env.stop()
        with pytest.raises(InfrastructureError, match="verifiers-notes"):
            await beside.act(add("a"))
        await beside.start(0)
        assert not (await beside.act(add("a"))).done, "the next episode has a new process"
        with pytest.raises(InfrastructureError, match="taskset 'verifiers-notes' ended"):
            await beside.act(add("die"))
        await beside.stop()

    run(body())


def test_validation_finds_the_task_that_is_flaky(run: Any, play: Any) -> None:
    async def found() -> dict[str, str | None]:
        return {check.task: check.problem async for check in play("verifiers-sums", config=SUMS).validate()}

    checks = run(found())
    assert len(checks) == 40
    assert {task: problem for task, problem in checks.items() if problem} == {"verifiers-sums/17": "flaky"}


def test_what_cannot_be_played_is_refused_with_its_reason(run: Any, play: Any) -> None:
    with pytest.raises(InfrastructureError, match=r"ran of verifiers-needy need a machine"):
        run(play("verifiers-needy").start(0))
    with pytest.raises(InfrastructureError, match=r"has no verifiers: pip install .*name another interpreter"):
        run(make_env("argosy/verifiers", taskset="verifiers-sums", python=sys.executable).start(0))
    with pytest.raises(ValueError, match="there is no interpreter 'nopython'"):
        run(make_env("argosy/verifiers", taskset="verifiers-sums", python="nopython").start(0))
