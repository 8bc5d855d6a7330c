"""The repair tasks: solvable by who reads the examples, not by who guesses; unseen bugs stay unseen."""

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from argosy.envs import Message, ToolCall, close_shared_pools, make_env
from argosy.envs import repair_functions as library
from argosy.envs.repair import EXAMPLES, HIDDEN, OPERATORS, Expert, Formula, Repair
from argosy.envs.repair_library import RepairLibrary, names, source, variants
from gymnasium.utils.env_checker import check_env

Policy = Callable[[Repair, Sequence[Message]], ToolCall]


def play(policy: Policy, seed: int = 0, level: int = 1) -> tuple[float, dict[str, float], list[Message]]:
    """One episode; returns the reward, its parts and the messages."""

    async def episode() -> tuple[float, dict[str, float], list[Message]]:
        env = make_env("argosy/repair", level=level)
        messages = await env.start(seed)
        done = False
        while not done:
            step = await env.act([policy(env, messages)], "")  # type: ignore[arg-type]
            messages += step.messages
            done = step.done
        grade = await env.score()
        await env.stop()
        await close_shared_pools()
        return grade.reward, dict(grade.parts), messages

    return asyncio.run(episode())


def careful(env: Repair, messages: Sequence[Message]) -> ToolCall:
    """Reads only what a model sees: opens files, tests, and edits the line that the first failing example names."""
    listed = str(messages[1]["content"]).split("\n")[0].split()
    seen = sum(message.get("name") == "read_file" for message in messages)
    if len(listed) > 1 and seen < len(listed):
        return ToolCall("read_file", {"file": listed[seen]})
    last = str(messages[-1]["content"])
    rows = [re.fullmatch(r"(\w)\((\d)\) is (-?\d+), want (-?\d+)", row) for row in last.splitlines()]
    if last == "passed":
        return ToolCall("submit", {})
    if not rows or rows[0] is None or rows[1] is None:
        return ToolCall("run_tests", {})
    name, zero, one = rows[0][1], int(rows[0][4]), int(rows[1][4])
    formula = f"x + {zero}" if zero > 0 else f"x - {-zero}" if zero < 0 else f"x * {one}"
    file = {"f": "a.py", "g": listed[-1]}[name]
    line = 2 if name == "f" or len(listed) > 1 else 4
    return ToolCall("edit", {"file": file, "line": line, "text": f"return {formula}"})


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whoever_reads_the_examples_solves_it(level: int, seed: int) -> None:
    reward, parts, _ = play(careful, seed, level)
    assert (reward, parts) == (1.0, {"functions": 1.0})


@pytest.mark.parametrize("level", [1, 2, 3])
def test_handing_in_the_untouched_code_earns_nothing(level: int) -> None:
    reward, _, _ = play(lambda env, messages: ToolCall("submit", {}), level=level)
    assert reward == 0.0


@pytest.mark.parametrize(
    "line",
    [
        "return [f for f in object.__subclasses__()][0]",
        "while True: pass",
        "import os; os._exit(0)",
        "import os; os.kill(1, 9) or os.kill(os.getppid(), 9)",
        "print('{\"value\": 1}'); return 1",
        "return {0: 0, 1: 1}.get(x)",
        "return True",
        "return",
        "retrun x",
        "global y; return type('I', (int,), {'__eq__': lambda s, o: True})(x)",
    ],
)
def test_an_edit_that_is_no_repair_earns_nothing_and_harms_nobody(line: str) -> None:
    def cheat(env: Repair, messages: Sequence[Message]) -> ToolCall:
        edited = any(message.get("name") == "edit" for message in messages)
        tested = any(message.get("name") == "run_tests" for message in messages)
        if not edited:
            return ToolCall("edit", {"file": "a.py", "line": 2, "text": line})
        return ToolCall("submit" if tested else "run_tests", {})

    reward, _, _ = play(cheat)
    assert reward == 0.0


def test_every_repair_of_level_one_follows_from_the_examples() -> None:
    """No two formulas agree on the visible examples and differ on the hidden ones."""
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for operator in OPERATORS:
        for constant in range(2, 100):
            formula = Formula(operator, constant)
            shown = tuple(formula(x) for x in EXAMPLES)
            assert seen.setdefault(shown, tuple(formula(x) for x in HIDDEN)) == tuple(formula(x) for x in HIDDEN)


def test_held_out_bugs_are_never_trained_on() -> None:
    def tasks(split: str) -> set[tuple[str, str]]:
        env = make_env("argosy/repair", split=split)
        assert isinstance(env, Repair)
        found = set()
        for seed in range(3000):
            env.setup(seed, {})
            found |= {(str(function.wanted), str(function.broken)) for function in env.functions}
        return found

    train, held_out = tasks("train"), tasks("held_out")
    assert not train & held_out
    assert len(train) > 2000 and len(held_out) > 1000


def test_the_same_seed_is_the_same_episode() -> None:
    first, second = (play(careful, seed=7, level=3) for _ in range(2))
    assert first == second
    assert play(careful, seed=8, level=3) != first


def test_the_expert_is_clumsy_but_sometimes_right() -> None:
    async def success(skill: float) -> float:
        total = 0.0
        for seed in range(60):
            env = make_env("argosy/repair")
            assert isinstance(env, Repair)
            messages = await env.start(seed)
            expert = Expert(env, random.Random(seed))
            expert.skill = skill
            done = False
            while not done:
                call = re.fullmatch(
                    r'<tool_call>\n\{"name": "(\w+)", "arguments": (\{.*\})\}\n</tool_call>', expert(messages)
                )
                calls = [ToolCall(call[1], json.loads(call[2]))] if call else None
                step = await env.act(calls, "", None if call else "malformed")
                messages += step.messages
                done = step.done
            total += (await env.score()).reward
            await env.stop()
        return total / 60

    async def both() -> tuple[float, float]:
        result = await success(0.3), await success(1.0)
        await close_shared_pools()
        return result

    clumsy, skilled = asyncio.run(both())
    assert 0.15 < clumsy < 0.55 < skilled


# Level 4: ordinary functions with ordinary bugs.


def restored(env: Repair, messages: Sequence[Message]) -> ToolCall:
    """Writes every line as it should be, then hands in."""
    assert isinstance(env, RepairLibrary)
    for exercise in env.exercises:
        lines = env.files[exercise.file].splitlines()
        start = lines.index(f"def {exercise.name}({source(exercise.name).partition('(')[2].splitlines()[0]}")
        for offset, right in enumerate(exercise.source.splitlines()):
            if lines[start + offset] != right:
                change = {"file": exercise.file, "line": start + offset + 1, "text": right.strip()}
                return ToolCall("edit", change)
    return ToolCall("submit", {})


@pytest.mark.parametrize("seed", range(6))
def test_one_line_is_wrong_and_its_repair_earns_all(seed: int) -> None:
    reward, _, messages = play(restored, seed, level=4)
    assert reward == 1.0
    assert [message.get("name") for message in messages[2:]] == ["edit", "submit"]
    tested, _, messages = play(lambda env, seen: ToolCall(("run_tests", "submit")[len(seen) > 2], {}), seed, level=4)
    assert tested == 0.0
    assert re.match(r"\w+\(.*\) is .*, want ", messages[2]["content"])


@pytest.mark.parametrize("name", library.CASES)
def test_the_cases_of_a_function_run_every_line_of_it(name: str) -> None:
    function, cases, ran = getattr(library, name), library.CASES[name], set()
    code = function.__code__

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is code:
            ran.add(frame.f_lineno)
        return trace if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for case in json.loads(json.dumps(cases)):
            function(*case)
    finally:
        sys.settrace(before)
    assert {line for _, _, line in code.co_lines() if line} <= ran
    assert len(cases) >= 5 and json.loads(json.dumps(cases)) == cases


def test_held_out_functions_are_in_no_file_of_training() -> None:
    assert not set(names("train")) & set(names("held_out"))
    assert len(names("train")) == 24 and len(names("held_out")) == 6
    assert all(len(variants(name)) >= 8 for name in library.CASES)

    async def seen(split: str) -> set[str]:
        found = set()
        for seed in range(40):
            env = make_env("argosy/repair", level=4, split=split)
            assert isinstance(env, RepairLibrary)
            await env.start(seed)
            found |= set(re.findall(r"^def (\w+)", "\n".join(env.files.values()), re.M))
            await env.stop()
        await close_shared_pools()
        return found

    assert asyncio.run(seen("train")) == set(names("train"))
    assert asyncio.run(seen("held_out")) == set(names("held_out"))


def test_its_expert_repairs_some() -> None:
    async def success(skill: float) -> float:
        total = 0.0
        for seed in range(16):
            env = make_env("argosy/repair", level=4)
            messages = await env.start(seed)
            expert = env.expert(random.Random(seed))
            expert.skill = skill
            done = False
            while not done:
                call = json.loads(expert(messages).splitlines()[1])
                step = await env.act([ToolCall(call["name"], call["arguments"])], "")
                messages += step.messages
                done = step.done
            total += (await env.score()).reward
            await env.stop()
        await close_shared_pools()
        return total / 16

    clumsy, skilled = asyncio.run(success(0.2)), asyncio.run(success(1.0))
    assert 0.1 < clumsy < 0.6 < skilled


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_it_is_a_gymnasium_environment(level: int) -> None:
    env = make_env("argosy/repair", level=level)
    check_env(env, skip_render_check=True)
    env.close()
