"""What a sandbox costs: ours against plain `docker run` and `docker exec`, plain `bwrap` and a bare persistent shell.

    .venv/bin/python benchmarks/sandbox.py             a table, after about a minute
    .venv/bin/python benchmarks/sandbox.py --json      the same numbers as JSON
    .venv/bin/python benchmarks/sandbox.py --check     exit status 1 if an aim is missed

Everything is measured in one run on one machine; contenders take turns, so that what disturbs one disturbs all, and the
numbers are medians. Docker needs an engine (DOCKER_HOST) and an image with bash (--image); without, its rows are left
out. `python tests/envs/docker_engine.py` starts an engine and makes an image where there is neither.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from argosy.envs import Sandbox, SandboxPool, SandboxSpec, SandboxUnavailable
from argosy.envs.grading import grade
from argosy.envs.sandboxes.docker import DockerSandbox
from argosy.envs.tasks import Grading, Stage, Task
from rich.console import Console
from rich.table import Table

AIM_ACQUIRE = 20.0  # times faster from a warm pool than a cold `docker run`
AIM_EXEC = 2.0  # times a bare persistent shell, at most
HARDENED = ["--network", "none", "--init", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
COMMAND = "echo hi"

Action = Callable[[], Awaitable[object]]


@dataclass
class Row:
    what: str
    who: str
    seconds: float
    against: str = ""
    """The row that it is compared with."""


async def medians(actions: dict[str, Action], rounds: int) -> dict[str, float]:
    """Of the seconds of each, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            began = time.perf_counter()
            await action()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in taken.items()}


def program(*words: str) -> Action:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        _, complaint = await process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(words)}: {complaint.decode()}")

    return run


class BareShell:
    """A shell at the end of a pipe, a line of its output for each line of input."""

    async def start(self, *words: str) -> Action:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
        return self._run

    async def _run(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{COMMAND}\n".encode())
        await self._process.stdout.readline()

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()


async def back_end(spec: SandboxSpec, plain_start: Action, rounds: int) -> list[Row]:
    """Start, acquire and exec of one back end, against its own plain program."""
    name, plain = spec.backend, {"docker": "docker run", "bubblewrap": "bwrap"}[spec.backend]

    async def start() -> None:
        opened.append(await Sandbox.open(spec))

    async def acquire() -> None:
        opened.append(await pool.acquire())

    opened: list[Sandbox] = []
    rows = []
    found = await medians({plain: plain_start, name: start}, rounds)
    rows += [Row("start", plain, found[plain]), Row("start", name, found[name], plain)]
    for sandbox in opened:
        await sandbox.close()

    pool = SandboxPool(2, spec)
    await pool.warm()
    taken = []
    for _ in range(rounds):
        opened.clear()
        taken.append((await medians({name: acquire}, 1))[name])
        await pool.release(opened[0])
    rows.append(Row("acquire, warm", name, statistics.median(taken), plain))
    await pool.close()
    return rows


async def commands(spec: SandboxSpec, bare_command: Callable[[Any], list[str]], rounds: int) -> list[Row]:
    sandbox = await Sandbox.open(spec)
    bare = BareShell()
    name, bare_name = spec.backend, f"bare shell, {spec.backend}"
    actions: dict[str, Action] = {bare_name: await bare.start(*bare_command(sandbox))}
    actions[name] = lambda: sandbox.exec(COMMAND)
    await medians(actions, 10)
    found = await medians(actions, 20 * rounds)
    rows = [Row("exec", bare_name, found[bare_name]), Row("exec", name, found[name], bare_name)]
    if isinstance(sandbox, DockerSandbox):
        plain = program("docker", "exec", sandbox._container, "sh", "-c", COMMAND)
        rows.append(Row("exec", "docker exec", (await medians({"": plain}, rounds))[""], bare_name))
    await bare.close()
    await sandbox.close()
    return rows


async def grading(spec: SandboxSpec, rounds: int, workers: int = 4) -> list[Row]:
    """Seconds for each of many grades, four at a time: a clean sandbox, the work carried over, the tests run."""
    stage = Stage("Add.", Grading("test $(cat answer) = 42"))
    task = Task("benchmark/add", (stage,), spec)
    sandboxes = [await Sandbox.open(spec) for _ in range(workers)]
    for sandbox in sandboxes:
        await sandbox.write("answer", "42")
    began = time.perf_counter()

    async def work(sandbox: Sandbox) -> None:
        for _ in range(rounds):
            result = await grade(task, stage, sandbox)
            assert result.reward == 1, result

    await asyncio.gather(*map(work, sandboxes))
    taken = time.perf_counter() - began
    for sandbox in sandboxes:
        await sandbox.close()
    return [Row("grade, 4 at a time", spec.backend, taken / (rounds * workers))]


async def measure(image: str | None, rounds: int) -> list[Row]:
    bubblewrap = SandboxSpec()
    rows = await back_end(bubblewrap, program(*BWRAP, "true"), rounds)
    rows += await commands(bubblewrap, lambda _: [*BWRAP, "bash"], rounds)
    rows += await grading(bubblewrap, rounds)
    if image:
        docker = SandboxSpec("docker", image)
        rows += await back_end(docker, program("docker", "run", "--rm", *HARDENED, image, "true"), rounds)
        rows += await commands(docker, lambda sandbox: ["docker", "exec", "-i", sandbox._container, "bash"], rounds)
        rows += await grading(docker, max(2, rounds // 4))
    return rows


def aims(rows: list[Row]) -> dict[str, bool]:
    of = {(row.what, row.who): row.seconds for row in rows}
    found = {}
    if ("start", "docker run") in of:
        for name in ("bubblewrap", "docker"):
            met = of["start", "docker run"] / of["acquire, warm", name] >= AIM_ACQUIRE
            found[f"{name}: a warm one at least {AIM_ACQUIRE:g} times faster than a cold docker run"] = met
    for name in ("bubblewrap", "docker"):
        if ("exec", name) in of:
            met = of["exec", name] <= AIM_EXEC * of["exec", f"bare shell, {name}"]
            found[f"{name}: exec within {AIM_EXEC:g} times a bare persistent shell"] = met
    return found


def table(rows: list[Row]) -> Table:
    shown = Table(title="sandboxes", title_justify="left")
    for name in ("", "who", "ms", "a second", "against"):
        shown.add_column(name, justify="left" if name in ("", "who", "against") else "right")
    of = {(row.what, row.who): row.seconds for row in rows}
    for row in rows:
        other = of.get((row.what, row.against)) or of.get(("start", row.against))
        factor = "" if other is None else f"{other / row.seconds:.2f} x {row.against}"
        shown.add_row(row.what, row.who, f"{row.seconds * 1e3:.2f}", f"{1 / row.seconds:.1f}", factor)
    return shown


async def usable(image: str) -> str | None:
    """The image, if an engine has it and there is a client to compare with."""
    if not shutil.which("docker"):
        print("No docker client: Docker's rows are left out.", file=sys.stderr)
        return None
    try:
        await (await Sandbox.open(SandboxSpec("docker", image))).close()
    except SandboxUnavailable as error:
        print(f"Docker's rows are left out: {error}", file=sys.stderr)
        return None
    return image


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="argosy/tests:debian", help="of Docker's sandboxes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = await measure(await usable(arguments.image), arguments.rounds)
    met = aims(rows)
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "aims": met}, indent=2))
    else:
        Console().print(table(rows))
        for aim, reached in met.items():
            print("met   " if reached else "MISSED", aim)
    if arguments.check and not all(met.values()):
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
