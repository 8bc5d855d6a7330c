"""Broken environments, each with one fault: `check` names it, says where, and survives it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from argosy.envs.check import Report, check
from argosy.envs.random_calls import valid_call

READS_CALLS = "argosy.actors.tool_calls:parse"
ENVIRONMENTS = """
import asyncio, os, random, subprocess, threading, time
from argosy.envs import Grade, InfrastructureError, ToolCall, ToolEnv, tool

held = []


class Sound(ToolEnv):
    '''Say the number.'''

    max_turns = 4

    def setup(self, seed, options):
        self.number, self.right = seed * 7 % 10, False
        return f"Say {self.number}."

    @tool
    async def say(self, number: int) -> str:
        '''Say it.

        Args:
            number: which
        '''
        self.right = number == self.number
        if self.right:
            self.finish()
        return await self.answer(number)

    async def answer(self, number):
        return "yes" if self.right else "no"

    def grade(self):
        return Grade(float(self.right))

    def expert(self, rng):
        return lambda messages: str(ToolCall("say", {"number": self.number}))


class Unseeded(Sound):
    def setup(self, seed, options):
        return f"{super().setup(seed, options)} {random.random()}"


class Leftover(Sound):
    count = 0

    async def answer(self, number):
        self.count += 1
        return str(self.count)


class Hashed(Sound):
    async def answer(self, number):
        return str(set("abcdefgh"))


class Expects(Sound):
    def expert(self, rng):
        self.number = 5
        return super().expert(rng)

    async def answer(self, number):
        return str(self.number)


class Shared(Sound):
    def setup(self, seed, options):
        held.clear()
        return super().setup(seed, options)

    async def answer(self, number):
        await asyncio.sleep(0.005)
        held.append(number)
        return str(len(held))


class Leaks(Sound):
    def setup(self, seed, options):
        subprocess.Popen(["sleep", "98765.4"], start_new_session=True)
        os.open("/dev/null", os.O_RDONLY)
        threading.Thread(target=time.sleep, args=(98765,)).start()
        return super().setup(seed, options)


class NotANumber(Sound):
    def grade(self):
        return Grade(float("nan"))


class Raises(Sound):
    def setup(self, seed, options):
        raise KeyError("no data")


class KeepsOn(Sound):
    def close_episode(self):
        raise OSError("no such session")


class Trips(Sound):
    async def answer(self, number):
        return "abc"[number]


class Infrastructure(Sound):
    async def answer(self, number):
        raise InfrastructureError("the database is down")


class Waits(Sound):
    async def answer(self, number):
        await asyncio.sleep(98765)


class Blocks(Sound):
    async def answer(self, number):
        subprocess.run(["sleep", "98765.5"])


class Dawdles(Sound):
    async def answer(self, number):
        time.sleep(0.4)
        return "no"


class Dies(Sound):
    async def answer(self, number):
        subprocess.Popen(["sleep", "98765.6"])
        os._exit(3)


class Worthless(Sound):
    def grade(self):
        return Grade(-1000.0)
"""


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("check") / "environments.py"
    file.write_text(ENVIRONMENTS)
    return file


def problems(report: Report) -> dict[str, tuple[str, str]]:
    assert all(finding.fix for finding in report.findings if finding.status in ("warn", "fail"))
    return {f.what: (f.status, f.found) for f in report.findings if f.status in ("warn", "fail")}


@pytest.mark.parametrize(
    ("name", "what", "found"),
    [
        ("Unseeded", "same seed, same episode", "the opening was"),
        ("Leftover", "same seed, same episode", "turn 1 was answered"),
        ("Hashed", "same in another process", "turn 1 was answered"),
        ("Expects", "replays", "expert calls: turn 1 was answered"),
        ("Shared", "side by side", "was answered"),
        ("NotANumber", "runs", "reward must be one finite number, not nan"),
        ("Raises", "runs", "KeyError: 'no data'"),
        ("Trips", "runs", "IndexError"),
        ("KeepsOn", "runs", "OSError: no such session"),
        ("Infrastructure", "runs", "InfrastructureError: the database is down"),
        ("Waits", "runs", "TimeoutError: no answer within 1 s"),
        ("Blocks", "answers in time", "blocked for more than 1 s"),
        ("Dies", "survives", "the process ended with 3 during say"),
    ],
)
def test_what_would_spoil_training_fails(name: str, what: str, found: str, file: Path) -> None:
    parse = READS_CALLS if name == "Expects" else ""
    report = check(f"{file}:{name}", seeds=1, seconds=1.0, parse=parse)
    assert not report.ok
    status, text = problems(report)[what]
    assert status == "fail" and found in text, text
    if what in ("runs", "answers in time"):
        assert "environments.py:" in text, "the line of the author's code"


def test_what_is_left_behind_is_counted_and_ended(file: Path, processes_with: Any) -> None:
    report = check(f"{file}:Leaks", seeds=1)
    left = [finding.found for finding in report.findings if finding.what == "leaves nothing"]
    assert [text.split(" more")[0].split()[1] for text in left] == ["processes", "files", "threads"]
    assert "sleep 98765.4" in left[0] and "/dev/null" in left[1]
    assert not processes_with("sleep 98765"), "neither of this nor of the one that blocked"


def test_what_would_make_it_worse_is_a_warning(file: Path) -> None:
    report = check(f"{file}:Dawdles", seeds=1, parse=READS_CALLS)
    assert problems(report).keys() == {"lets others run"} and report.ok
    assert "say({" in problems(report)["lets others run"][1]
    assert problems(check(f"{file}:Worthless", seeds=1, parse=READS_CALLS)).keys() == {"rewards"}


def test_what_does_not_load_says_why(tmp_path: Path) -> None:
    sloppy = tmp_path / "sloppy.py"
    hintless = ENVIRONMENTS.split("class Unseeded")[0].replace("number: int", "number")
    for text, why in (
        (hintless, "ValueError: tool say: parameter 'number' needs a type hint"),
        ("import not_installed", "No module named 'not_installed' (sloppy.py:1"),
        ("def f(:", "SyntaxError"),
    ):
        sloppy.write_text(text)
        (finding,) = check(str(sloppy)).findings
        assert finding.what == "loads" and why in finding.found.replace(f"{tmp_path}/", ""), finding.found
    assert "no environment 'argosy/repiar': did you mean 'argosy/repair'" in check("argosy/repiar").findings[0].found


def test_on_the_command_line(file: Path) -> None:
    def envs(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "argosy.deploy.cli", "envs", *arguments]
        return subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=90)

    shown = envs("check", "environments.py:Sound", "--seeds", "2")
    assert shown.returncode == 0, shown.stderr
    for text in ("Fit for training.", "Say 7.", '"name": "say"', "<tool_response>", "random 0", "expert 1", "p95"):
        assert text in shown.stdout, shown.stdout
    failed = envs("check", "environments.py:Raises", "--json", "--seeds", "1")
    report = json.loads(failed.stdout)
    assert failed.returncode == 1 and not report["ok"] and not report["shown"]["prompt"]
    assert "KeyError" in next(f["found"] for f in report["findings"] if f["what"] == "runs")
    wrong = envs("check", "environments.py:Sound", "level")
    assert wrong.returncode == 2 and "write name=value" in wrong.stderr
    assert "argosy/repair" in envs("list").stdout


def test_random_calls_fit_their_schema() -> None:
    import random

    from argosy.envs import Tool
    from pydantic import BaseModel, Field

    class Place(BaseModel):
        row: int = Field(ge=0, le=3)
        names: list[str] = Field(min_length=1)

    def go(self: Any, place: Place, share: float | None = None, deep: dict[str, Any] | None = None) -> None: ...

    tool = Tool.of(go)
    drawn = [valid_call([tool.schema], [{"content": "main.py"}], random.Random(seed)) for seed in range(50)]
    assert [tool.bind(call.arguments)["place"].row for call in drawn]
    assert {call.arguments["place"]["row"] for call in drawn} == {0, 1, 2, 3}
    again = [valid_call([tool.schema], [{"content": "main.py"}], random.Random(seed)) for seed in range(50)]
    assert drawn == again and any("main.py" in call.arguments["place"]["names"] for call in drawn)
