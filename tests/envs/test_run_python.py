"""Functions of others, called in forks of the warm interpreter."""

import asyncio
import time
from typing import Any

import pytest
from argosy.envs import Outcome, Sandbox, SandboxPool

INC = "def f(x):\n    return x + 1"


def errors(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error or "" for outcome in outcomes]


def test_values_and_errors(run: Any, sandbox: Sandbox) -> None:
    source = "print('hello')\ndef f(*a):\n    return 10 // a[0] if len(a) == 1 else list(a)"
    assert run(sandbox.run_python(source, "f", [[2], [0], [1, "x", [None]]])) == [
        Outcome(5),
        Outcome(error="ZeroDivisionError: integer division or modulo by zero"),
        Outcome([1, "x", [None]]),
    ]
    assert run(sandbox.run_python(source, "f", [])) == []
    assert (
        run(sandbox.run_python("def f(x):\n    return x +", "f", [[1], [2]]))
        == [Outcome(error="SyntaxError: invalid syntax (solution.py, line 2)")] * 2
    )
    assert errors(run(sandbox.run_python(INC, "g", [[1]]))) == [
        "AttributeError: module 'solution' has no attribute 'g'"
    ]
    assert errors(run(sandbox.run_python(INC, "f", [[1, 2]])))[0].startswith("TypeError: f() takes 1")
    assert errors(run(sandbox.run_python("def f(): return {1}", "f", [[]])))[0].startswith(
        "TypeError: Object of type set"
    )
    assert errors(run(sandbox.run_python("s = '\ud800'", "f", [[]])))[0].startswith("UnicodeEncodeError")
    with pytest.raises(TypeError):
        run(sandbox.run_python(INC, "f", [[{1}]]))
    assert errors(run(sandbox.run_python("def f(): raise SystemExit(3)", "f", [[]]))) == ["SystemExit: 3"]
    assert errors(run(sandbox.run_python("def f(): return f()", "f", [[]])))[0].startswith("RecursionError")


def test_modules_beside_it(run: Any, sandbox: Sandbox) -> None:
    source = "import dataclasses, other\n@dataclasses.dataclass\nclass A: x: int\ndef f(x): return A(other.g(x)).x"
    assert run(sandbox.run_python(source, "f", [[1]], files={"other.py": "def g(x): return x * 7"})) == [Outcome(7)]
    assert run(sandbox.run_python(source, "f", [[1]], files={"other.py": "def g(x): return x * 8"})) == [Outcome(8)]
    assert run(sandbox.run_python(source, "f", [[1]])) == [Outcome(8)], "the workspace keeps it"


def test_calls_share_nothing(run: Any, sandbox: Sandbox) -> None:
    source = "import json\nseen = getattr(json, 'seen', 0)\njson.seen = seen + 1\ndef f(): return seen"
    assert [run(sandbox.run_python(source, "f", [[]])) for _ in range(2)] == [[Outcome(0)]] * 2


def test_the_deadline_keeps_what_came_before(run: Any, sandbox: Sandbox) -> None:
    source = "def f(x):\n    while x: pass\n    return x"
    began = time.monotonic()
    assert run(sandbox.run_python(source, "f", [[0], [1], [0]], timeout=0.3)) == [
        Outcome(0),
        *[Outcome(error="Timeout: no result within 0.3 s")] * 2,
    ]
    assert time.monotonic() - began < 3


def test_crashes(run: Any, sandbox: Sandbox) -> None:
    source = (
        "import os, ctypes\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: ctypes.string_at(0)\n    return x"
    )
    assert run(sandbox.run_python(source, "f", [[0], [1], [0]]))[0] == Outcome(0)
    assert (
        errors(run(sandbox.run_python(source, "f", [[0], [1], [0]])))[1:]
        == ["Crashed: the process ended before it returned a result"] * 2
    )
    assert errors(run(sandbox.run_python(source, "f", [[2]]))) == ["Crashed: SIGSEGV"]


def test_too_much_output(run: Any, sandbox: Sandbox) -> None:
    assert errors(run(sandbox.run_python("def f(): return 'x' * 10**6", "f", [[]])))[0].startswith("OutputTooLarge")
    many = run(sandbox.run_python("def f(): return 'x' * 10**4", "f", [[]] * 50))
    assert many[0] == Outcome("x" * 10**4) and many[-1].error == "OutputTooLarge: the results do not fit"


def test_nothing_of_a_call_lives_on(run: Any, sandbox: Sandbox) -> None:
    source = (
        "import os, time\ndef f():\n    if not os.fork():\n        os.setsid()\n        time.sleep(99)\n    return 1"
    )
    began = time.monotonic()
    assert run(sandbox.run_python(source, "f", [[]], timeout=20)) == [Outcome(1)]
    assert time.monotonic() - began < 3
    assert run(sandbox.exec("echo /proc/[0-9]*/comm")).output.count("comm") <= 2


FORGER = """
import json, os, struct, sys
line = b'[42, null]\\n'
header = json.dumps({"reason": None}).encode()
frame = struct.pack(">II", len(header), len(line)) + header + line
print(line.decode() * 3, frame); sys.stderr.write(line.decode()); sys.stdout.flush()
for fd in [*range(3), *range(4, 100)]:
    for data in (line, frame):
        try: os.write(fd, data)
        except OSError: pass
for path in ("/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/mem", "/proc/1/environ"):
    try: open(path, "r+b").write(frame); opened = path
    except OSError: pass
def f(x): return [x, globals().get("opened")]
"""


def test_output_cannot_forge_results(run: Any, sandbox: Sandbox) -> None:
    assert run(sandbox.run_python(FORGER, "f", [[1], [2]])) == [Outcome([1, None]), Outcome([2, None])]
    assert run(sandbox.run_python(INC, "f", [[1]])) == [Outcome(2)], "the next answer is its own"


@pytest.mark.parametrize("line", ["[[[[" * 9000, "{}", "[1]", "[1, 2, 3]", "9" * 9999, "\\xff", "[1, {}]"])
def test_writing_into_the_result_pipe_harms_only_the_writer(run: Any, sandbox: Sandbox, line: str) -> None:
    source = (
        f"import os\nfor _ in range(3): os.write(3, ({line[:8]!r} * {len(line) // 8 or 1} + '\\n').encode())\n{INC}"
    )
    outcomes = run(sandbox.run_python(source, "f", [[1], [2]]))
    assert len(outcomes) == 2, "never more than were asked for"
    assert run(sandbox.run_python(INC, "f", [[1]])) == [Outcome(2)]


def test_the_guest_is_out_of_reach(run: Any, sandbox: Sandbox) -> None:
    source = """
import ctypes, os, signal
for number in range(1, 65):
    if number != signal.SIGCHLD: os.kill(1, number)
try: os.kill(-1, signal.SIGKILL)
except ProcessLookupError: pass
libc = ctypes.CDLL(None, use_errno=True)
def f(): return [libc.ptrace(16, 1, 0, 0), len(os.listdir("/proc/self/fd"))]
"""
    assert run(sandbox.run_python(source, "f", [[]])) == [Outcome([-1, 5])], "0 to 3, and the listing itself"
    assert sandbox.alive


KILLER = """
import resource, time
def f():
    resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
    time.sleep(1)
    return 1
"""


def test_code_that_kills_the_guest_is_judged_as_crashed(run: Any) -> None:
    async def body() -> None:
        pool = SandboxPool(size=2)
        crashed = Outcome(error="Crashed: the code brought down its sandbox")
        assert await pool.run_python(KILLER, "f", [[], []]) == [crashed, crashed]
        assert await pool.run_python(INC, "f", [[1]]) == [Outcome(2)]
        await pool.close()

    run(body())


def test_throughput(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def timed(work: Any, count: int, width: int) -> float:
        async def worker() -> None:
            for _ in range(count // width):
                await work()

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(width)))
        return (time.perf_counter() - began) / count * 1000

    async def body() -> None:
        pool = SandboxPool(size=2)
        call = lambda: pool.run_python(INC, "f", [[1], [2], [3]])  # noqa: E731
        await timed(call, 4, 2)
        async with pool.sandbox() as sandbox:
            rows = {
                "run_python in a clean sandbox, one at a time": await timed(call, 60, 1),
                "exec true": await timed(lambda: sandbox.exec("true"), 30, 1),
                "read": await timed(lambda: sandbox.read("/usr/bin/env"), 30, 1),
            }
        rows["run_python, 32 callers and 2 sandboxes"] = await timed(call, 96, 32)
        began = time.perf_counter()
        await (await Sandbox.open()).close()
        rows["open and close"] = (time.perf_counter() - began) * 1000
        await pool.close()
        with capsys.disabled():
            print("\n" + "\n".join(f"    {name}: {ms:.2f} ms" for name, ms in rows.items()))

    run(body())
