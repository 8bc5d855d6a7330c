"""Whether an agent can read in its sandbox what it must not know.

Invariant: looks at what the agent of a task finds when it begins, and at nothing else: its files, the usual places of
tests and solutions, all of its git history, and the instruction. A file counts as readable there if most of its telling
lines are, in one place; lines that its own version in the sandbox has are no secret.
"""

import io
import tarfile
from collections.abc import Iterable, Iterator

from ..sandboxes import Sandbox
from .task import Solution, Stage, Task

TELLING = 16  # characters: shorter lines (`return x`, `else:`) are found everywhere
SHARE = 0.8
PLACES = ("/tests", "/solution", "/r2e_tests", "/logs", "/tmp", "/root")
_GIT = "git -c safe.directory='*' --no-pager"
_HISTORY = (
    f"{{ {_GIT} log --all --reflog -p --no-color; "
    f"{_GIT} fsck --unreachable --no-reflogs | cut -d' ' -f3 | xargs -r {_GIT} show --no-color; "
    "} 2>/dev/null | head -c 8000000 >/tmp/.history"
)


async def leaks(task: Task, sandbox: Sandbox) -> list[str]:
    """What is readable and where, e.g. "solution of calc.py in notes/draft.txt", in the sandbox of a fresh episode."""
    seen = await _visible(task, sandbox)
    found = []
    for stage in task.stages:
        for kind, path, lines in _secrets(stage):
            secret = lines - seen.get(path, frozenset())
            places = [place for place, shown in seen.items() if secret and len(secret & shown) >= SHARE * len(secret)]
            found += [f"{kind} of {path} in {place}" for place in places]
    return found


def _secrets(stage: Stage) -> Iterator[tuple[str, str, frozenset[str]]]:
    solution = stage.solution or Solution()
    adds = "-" if " -R" in solution.command else "+"  # a patch that is to be undone removes what it is about
    for kind, files in (("solution", solution.files), ("hidden text", stage.grading.files)):
        for path, data in files.items():
            lines = data.decode(errors="replace").splitlines()
            if path.endswith((".patch", ".diff")):
                lines = [line[1:] for line in lines if line.startswith(adds if kind == "solution" else "+")]
            yield kind, path, _telling(lines)
    yield "solution", "its command", _telling(solution.command.splitlines())


async def _visible(task: Task, sandbox: Sandbox) -> dict[str, frozenset[str]]:
    seen = {"the instruction": _telling(task.stages[0].instruction.splitlines())}
    await sandbox.exec(_HISTORY, timeout=120)
    try:
        whole = await sandbox.snapshot([task.sandbox.workdir, *PLACES], ["**/.git/**", ".git/**"])
    except OSError:  # larger than a sandbox may be: of an image, and then at least the usual places
        whole = await sandbox.snapshot(PLACES)
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        for entry in tar:
            file = tar.extractfile(entry) if entry.isreg() else None
            if file is not None:
                history = entry.name.endswith("tmp/.history")
                lines = file.read().decode(errors="replace").splitlines()
                seen["the git history" if history else entry.name.removeprefix("./")] = _telling(
                    line[1:] if history else line for line in lines
                )
    return seen


def _telling(lines: Iterable[str]) -> frozenset[str]:
    return frozenset(stripped for line in lines if len(stripped := line.strip()) >= TELLING)
