"""Rows of a file, from the first seed to the reward."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from argosy.envs import InvalidGrade, SandboxPool, make_env
from argosy.envs.sources.jsonl import Jsonl
from argosy.envs.sources.order import position
from argosy.envs.tasks.reading import Problem


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


async def answered(env: Any, seed: int, text: str) -> float:
    await env.start(seed)
    step = await env.act(None, text)
    assert step.done and not step.truncated
    grade = await env.score()
    await env.stop()
    return grade.reward


def strict(answer: str, row: dict[str, Any]) -> float:
    return len(row["words"]) - answer.count(" ")


async def patient(answer: str, row: dict[str, Any]) -> float:
    return float(answer == row["answer"])


calls: list[str] = []


def moody(answer: str, row: dict[str, Any]) -> float:
    calls.append(answer)
    if answer == "crash":
        raise KeyError("nothing there")
    return {"a": 1.0, "b": 0.5, "": 1.0}.get(answer, float(len(calls) % 2)) if row["id"] != "nan" else float("nan")


def test_every_seed_has_its_row_and_every_row_its_seed(run: Any, written: Any) -> None:
    path = written(*({"id": i, "prompt": f"What is {i}?", "answer": str(i)} for i in range(100)))

    async def body() -> None:
        env, other = make_env("argosy/jsonl", path=path), make_env("argosy/jsonl", path=path)
        openings = [(await env.start(seed))[-1]["content"] for seed in range(100)]
        assert len(set(openings)) == 100, "an epoch meets every row once"
        assert openings[:5] == [(await other.start(seed))[-1]["content"] for seed in range(100, 105)]
        numbers = [int(text[8:-1]) for text in openings]
        assert min(abs(a - b) for a, b in itertools.pairwise(numbers)) > 30, "neighbours are far apart"
        split = {name: Jsonl(path, split=name) for name in ("train", "held_out")}
        kept = {name: {(await part.start(i))[-1]["content"] for i in range(len(part))} for name, part in split.items()}
        assert kept["train"] | kept["held_out"] == set(openings) and not kept["train"] & kept["held_out"]
        assert 10 <= len(kept["held_out"]) <= 30

    run(body())
    assert [position(seed, 1) for seed in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("checker", "row", "right", "wrong"),
    [
        ("exact", {"answer": "blue"}, ["blue\n", "<think>red?</think>blue", "x <answer>blue</answer>"], ["Blue", ""]),
        ("exact", {"answer": ["blue", "azure "]}, ["azure"], ["blue azure"]),
        ("contains", {"answer": "blue"}, ["it is blue."], ["<think>blue</think>red"]),
        ("regex", {"answer": r"^[ab]+$"}, ["abba"], ["abbc"]),
        ("number", {"answer": 1250}, ["2 + 3 = 1,250.0", "1.25e3", "3-1250."], ["1250 or 3", "", "none", "12.50"]),
        ("number", {"answer": "5 apples, so #### 72"}, ["72"], ["5"]),
        ("number", {"answer": 0.3333, "tolerance": 0.01}, ["0.334"], ["0.34"]),
        ("choice", {"answer": "C"}, ["C", "(C)", "B? No: it's C."], ["CAT", "C or D", "c"]),
        ("json", {"answer": [1, True]}, ["[1.0, true]", "So:\n```json\n[1, true]\n```"], ["[1, 1]", "["]),
        ("json", {"answer": {"a": [1]}}, ['{"a": [1]}'], ['{"a": [1], "b": 2}', '{"a": 1}']),
        ("json", {"answer": None}, ["null"], ["None"]),
        (f"{__name__}:patient", {"answer": "x"}, ["x"], ["y"]),
    ],
)  # fmt: skip
def test_checkers(run: Any, written: Any, checker: str, row: Any, right: Any, wrong: Any) -> None:
    path = written({"prompt": "?", **row})

    async def body() -> None:
        env = make_env("argosy/jsonl", path=path, checker=checker)
        assert [await answered(env, 0, text) for text in right] == [1.0] * len(right)
        assert [await answered(env, 0, text) for text in wrong] == [0.0] * len(wrong)

    run(body())


def test_code_is_run_in_a_sandbox_and_never_sees_what_is_expected(run: Any, written: Any) -> None:
    cases = [{"arguments": [[3, 1, 2]], "result": [1, 2, 3]}, {"arguments": [[]], "result": []}]
    path = written({"prompt": "Sort.", "function": "f", "cases": cases, "answer": "def f(x): return sorted(x)"})

    async def body() -> None:
        env = make_env("argosy/jsonl", path=path, checker="code")
        assert await answered(env, 0, "Like so:\n```python\ndef f(x):\n    return sorted(x)\n```\nDone.") == 1.0
        for attempt in (
            "def f(x): return x",
            "def g(x): return sorted(x)",
            "while True: pass",
            "",
            "import os; os._exit(0)",
        ):
            assert await answered(env, 0, attempt) == 0.0, attempt
        assert [check.problem async for check in env.validate()] == [None]
        await SandboxPool.shared().close()

    run(body())


def test_conversations_a_system_message_and_replay(run: Any, written: Any) -> None:
    talk = [{"role": role, "content": text} for role, text in (("user", "1?"), ("assistant", "1"), ("user", "2?"))]
    path = written({"messages": talk, "answer": "2"})

    async def body() -> None:
        env = Jsonl(path, system="Count.")
        assert await env.start(3) == [{"role": "system", "content": "Count."}, *talk]
        await env.act(None, "2")
        again = Jsonl(path, system="Count.")
        await again.replay(json.loads(json.dumps(env.checkpoint())))
        assert (await again.score()).reward == 1.0

    run(body())


def test_malformed_rows_are_named_and_the_rest_loads(run: Any, written: Any) -> None:
    path = written(
        {"id": "good", "prompt": "1+1?", "answer": 2},
        "{",
        "",
        {"prompt": "?", "answer": "two"},
        {"messages": [{"role": "robot", "content": "hi"}], "answer": 1},
        {"answer": 1},
        {"messages": [{"role": "assistant", "content": "hi"}], "answer": 1},
        "[1]",
    )
    env = Jsonl(path, "number")
    assert len(env) == 1 and run(answered(env, 5, "2")) == 1.0
    told = [str(error).removeprefix(path) for error in env.errors]
    assert told[0].startswith(":2: is not JSON: ")
    assert told[1] == ":4: answer: must be a number, or text that ends in one"
    assert told[2] == ":5: messages.0.role: input should be 'system', 'user' or 'assistant'"
    assert told[3] == ":6: needs either a prompt or messages"
    assert told[4] == ":7: the last of the messages must be the user's"
    assert told[5].startswith(":8: input should be a valid dictionary")
    with pytest.raises(Problem, match=r"more than 2 malformed rows \(most_malformed\): .*rows.jsonl:2: is not JSON"):
        len(Jsonl(path, "number", most_malformed=2))
    with pytest.raises(
        Problem, match=r"no row of split 'all' that checker 'code' can judge: .*:1: function: field req"
    ):
        len(Jsonl(path, "code"))
    with pytest.raises(Problem, match="there is no such file"):
        len(Jsonl(path + "x"))
    for wrong, complaint in (
        ("exactly", "write exact, "),
        ("nowhere:f", "cannot be imported"),
        ("json:loads", "function of"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Jsonl(path, wrong)
    with pytest.raises(ValueError, match="split must be one of"):
        Jsonl(path, split="test")


def test_a_failing_checker_is_nobodys_merit(run: Any, written: Any) -> None:
    path = written({"id": "x", "prompt": "?"}, {"id": "nan", "prompt": "?"})
    env = Jsonl(path, f"{__name__}:moody")
    seed = {run(env.question(seed)).id: seed for seed in range(2)}
    with pytest.raises(InvalidGrade, match=r"x: the checker failed on 'crash': KeyError"):
        run(answered(env, seed["x"], "crash"))
    with pytest.raises(InvalidGrade, match="finite"):
        run(answered(env, seed["nan"], "a"))


def test_validation_finds_what_is_wrong_with_tasks(run: Any, written: Any) -> None:
    text = "a long sentence that is the answer"
    rows = [("good", "b"), ("flaky", "sometimes"), ("leak", "a")]
    moody_rows = written(*({"id": id, "prompt": id, "answer": answer} for id, answer in rows), "{", name="moody.jsonl")
    exact_rows = written(
        {"id": "leaks", "prompt": f"Say: {text}", "answer": text}, {"id": "fine", "prompt": "?", "answer": "a"}
    )

    async def found(env: Jsonl) -> dict[str, set[str | None]]:
        problems: dict[str, set[str | None]] = {}
        async for check in env.validate():
            problems.setdefault(check.task.rpartition("/")[2], set()).add(check.problem)
        return problems

    assert run(found(Jsonl(moody_rows, f"{__name__}:moody"))) == {
        "moody.jsonl:4": {"malformed"},
        "good": {"empty passes", "reference fails"},
        "flaky": {"empty passes", "flaky"},
        "leak": {"empty passes"},
    }
    assert run(found(Jsonl(exact_rows))) == {"leaks": {"leaks its answer"}, "fine": {None}}
    assert run(found(Jsonl(exact_rows, "code"))) == {"rows.jsonl": {"malformed"}}, "nothing to play"


def test_a_large_file_is_indexed_once_and_not_held(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"prompt": f"{i} " + "x" * 2000, "answer": str(i)}) + "\n" for i in range(5000))
    first, second = Jsonl(str(path)), Jsonl(str(path))
    assert len(first) == 5000 and first.index is second.index
    assert len(first.index.places) * first.index.places.itemsize < 50_000
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "new", "answer": "new"}) + "\n")
    assert len(second) == 5001, "a file that changed is read again"
