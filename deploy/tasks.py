"""`argosy tasks`: what is in a task source, and whether it is fit for training.

Invariant: `validate` ends with status 1 if, and only if, it found something wrong; what it found is the same as a table
and as JSON.
"""

import asyncio
import difflib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from ..envs import close_shared_pools, make_env
from ..envs.tasks.load import SOURCES, Backend, Loaded, load_tasks
from ..envs.tasks.validation import Check, validate_tasks
from .make_tasks import make
from .options import named_values

tasks_app = typer.Typer(no_args_is_help=True, help="Task sources: what is in them, and whether they are sound.")
tasks_app.command()(make)
Source = Annotated[
    str,
    typer.Argument(
        help="harbor:PATH, swebench:FILE, terminal-bench:PATH, directory:PATH, factory:PATH, or an environment."
    ),
]
Settings = Annotated[list[str] | None, typer.Argument(help="Options of the source, as name=value.")]
Where = Annotated[str | None, typer.Option("--sandbox", help="bubblewrap or docker.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@tasks_app.command("list")
def list_(source: Source, settings: Settings = None, sandbox: Where = None, as_json: AsJson = False) -> None:
    """Print the tasks of a source, and what could not be loaded."""
    loaded = _load(source, named_values(settings, "image=python:3.12"), sandbox)
    if as_json:
        problems = [{"where": p.where, "field": p.field, "message": p.message} for p in loaded.problems]
        print(json.dumps({"tasks": [task.id for task in loaded.tasks], "problems": problems}, indent=2))
        return
    table = Table("task", "stages", "sandbox", "first line")
    for task in loaded.tasks:
        where = f"{task.sandbox.backend} {task.sandbox.image or ''}".strip()
        told = next(filter(str.strip, task.stages[0].instruction.splitlines()), "")
        table.add_row(Text(task.id), str(len(task.stages)), Text(where), Text(told[:60]))
    Console().print(table, *(Text(str(problem), style="red") for problem in loaded.problems))


@tasks_app.command()
def validate(
    source: Source,
    settings: Settings = None,
    limit: Annotated[int | None, typer.Option(help="Only so many tasks.", min=1)] = None,
    sandbox: Where = None,
    as_json: AsJson = False,
) -> None:
    """Find tasks that are broken, flaky or leak their answer: play the reference, the stub and nothing at all."""
    options = named_values(settings, "image=python:3.12")
    checks, count = _checks(source, options, sandbox, limit)
    try:
        found = asyncio.run(_collect(checks, count))
    except ValueError as error:  # what some sources notice only when they are played
        raise typer.BadParameter(str(error)) from None
    wrong = [check for check in found if check.problem is not None]
    tasks = len({check.task for check in found})
    sound = tasks - len({check.task for check in wrong})
    if as_json:
        problems = [asdict(check) for check in wrong]
        print(json.dumps({"source": source, "tasks": tasks, "sound": sound, "problems": problems}, indent=2))
    else:
        _print(wrong, tasks, sound)
    if wrong:
        sys.exit(1)


def _load(source: str, options: dict[str, Any], sandbox: str | None) -> Loaded:
    if sandbox not in (None, "bubblewrap", "docker"):
        raise typer.BadParameter(f"--sandbox is bubblewrap or docker, not {sandbox!r}")
    try:
        return load_tasks(source, cast(Backend | None, sandbox), **options)
    except (ValueError, TypeError) as error:  # TypeError: an option that this source does not have
        raise typer.BadParameter(str(error)) from None


def _checks(
    source: str, options: dict[str, Any], sandbox: str | None, limit: int | None
) -> tuple[AsyncIterator[Check], int | None]:
    """What will be found, and of how many tasks if that is known."""
    scheme = source.partition(":")[0]
    if scheme in SOURCES or (scheme != source and difflib.get_close_matches(scheme, SOURCES)):
        loaded = _load(source, options, sandbox)
        return validate_tasks(loaded, limit), min(len(loaded.tasks), limit or len(loaded.tasks)) + len(loaded.problems)
    try:
        env = make_env(source, **options)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    if not hasattr(env, "validate"):
        raise typer.BadParameter(f"{source} offers no validation: it has no method validate(limit)")
    return env.validate(limit), limit


async def _collect(checks: AsyncIterator[Check], count: int | None) -> list[Check]:
    found: list[Check] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("validating", total=count)
        try:
            async for check in checks:
                found.append(check)
                progress.update(bar, completed=len({each.task for each in found}))
        finally:
            await close_shared_pools()
    return found


def _print(wrong: list[Check], tasks: int, sound: int) -> None:
    console = Console()
    if wrong:
        table = Table(Column("task", overflow="fold"), "problem", Column("detail", overflow="fold"))
        for check in wrong:
            table.add_row(Text(check.task), Text(check.problem or ""), Text(check.detail))
        console.print(table)
    counts = Counter(check.problem for check in wrong)
    console.print(f"{sound} of {tasks} tasks are sound" + "".join(f", {n} {problem}" for problem, n in counts.items()))
