"""Task sources by name, such as "harbor:PATH" or "swebench:FILE"; `SOURCES` has them all.

Invariant: the same source gives the same tasks in the same order. Tasks that could not be loaded are told, each with
its file and field, beside those that could.
"""

import difflib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..sandboxes import SandboxSpec
from ..sources.order import check_split, in_split
from . import directory, factory, harbor, swebench, terminal_bench
from .harbor import Backend
from .reading import Problem
from .task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    tasks: tuple[Task, ...]
    problems: tuple[Problem, ...]


def load_tasks(source: str, backend: Backend | None = None, **options: Any) -> Loaded:
    """Read all tasks of a source; ValueError for a source or an option that does not exist.

    `backend` is where they run, None: as the format usually does. Further options: `image` for directory and factory
    tasks in Docker; `repository`, a local clone, for SWE-bench rows; `network` for those tasks of Harbor and
    Terminal-Bench that say nothing of it.
    """
    scheme, _, rest = source.partition(":")
    if scheme not in SOURCES or not rest:
        near = difflib.get_close_matches(scheme, SOURCES, n=1)
        hint = (
            f"did you mean {near[0]}:...?" if near else f"write one of {', '.join(f'{name}:...' for name in SOURCES)}"
        )
        raise ValueError(f"no task source {source!r}: {hint}")
    tasks: dict[str, Task] = {}
    problems: list[Problem] = []
    for found in SOURCES[scheme](rest, backend, **options):
        if isinstance(found, Problem):
            problems.append(found)
        elif found.id in tasks:
            problems.append(Problem(found.origin, "id", f"{found.id} is also in {tasks[found.id].origin}"))
        else:
            tasks[found.id] = found
    return Loaded(tuple(tasks.values()), tuple(problems))


@functools.lru_cache(maxsize=8)
def tasks_of(source: str, split: str = "all", backend: Backend | None = None, **options: Any) -> Loaded:
    """`load_tasks`, kept for the many environments of a process, and of the tasks those of a split."""
    check_split(split)
    loaded = load_tasks(source, backend, **options)
    for problem in loaded.problems:
        log.warning("left out: %s", problem)
    return Loaded(tuple(task for task in loaded.tasks if in_split(task.family or task.id, split)), loaded.problems)


def _folder(path: str) -> Path:
    if not Path(path).is_dir():
        raise ValueError(f"no folder {path!r} to load tasks from")
    return Path(path).resolve()


def _directory(path: str, backend: Backend | None, image: str | None = None) -> Iterator[Task | Problem]:
    return directory.load(_folder(path), _plain(backend, image))


def _plain(backend: Backend | None, image: str | None) -> SandboxSpec:
    """Tasks that bring all they need but Python."""
    if (backend == "docker") != (image is not None):
        raise ValueError("these tasks in Docker need backend='docker' and an image with python3, such as 'python:3.12'")
    return SandboxSpec(backend or "bubblewrap", image=image)


def _harbor(path: str, backend: Backend | None, network: bool = False) -> Iterator[Task | Problem]:
    return harbor.load(_folder(path), backend or "docker", network)


def _terminal_bench(path: str, backend: Backend | None, network: bool = False) -> Iterator[Task | Problem]:
    return terminal_bench.load(_folder(path), backend or "docker", network)


def _swebench(path: str, backend: Backend | None, repository: str | None = None) -> Iterator[Task | Problem]:
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} to load rows from")
    return swebench.load(Path(path), backend, Path(repository) if repository else None)


def _factory(path: str, backend: Backend | None, image: str | None = None) -> Iterator[Task | Problem]:
    return factory.load(_folder(path), _plain(backend, image))


SOURCES: dict[str, Callable[..., Iterator[Task | Problem]]] = {
    "directory": _directory,
    "factory": _factory,
    "harbor": _harbor,
    "swebench": _swebench,
    "terminal-bench": _terminal_bench,
}
