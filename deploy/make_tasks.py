"""`argosy tasks make`: repair tasks from a Python package, into a folder that `factory:FOLDER` names from then on."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..envs import UnusablePackage
from ..envs.tasks import factory, packages


def make(
    package: Annotated[
        str, typer.Argument(help="A folder, a source archive, or a name for pip such as boltons or toolz==1.0.0.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the tasks.")],
    count: Annotated[int, typer.Option("-n", help="How many tasks.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Another one gives other tasks.")] = 0,
    bugs: Annotated[int, typer.Option(help="Bugs in each task, in different functions.", min=1)] = 1,
    hint: Annotated[factory.Hint, typer.Option(help="What the agent is told of the place.")] = factory.Hint.NONE,
    jobs: Annotated[int, typer.Option(help="Sandboxes at once.", min=1)] = 2,
) -> None:
    """Make repair tasks from a pure-Python package with tests: put in bugs that some of its tests notice."""
    console = Console(stderr=True, highlight=False)
    try:
        factory.check_folder(out)
        found = packages.find(package)
        made = asyncio.run(factory.make(found, count, seed, bugs, hint, jobs, tell=console.print))
        factory.save(found, made.bugs, out)
    except (UnusablePackage, FileExistsError) as error:
        raise typer.BadParameter(str(error)) from None
    print(f"{out}: {made}")
    if not made.bugs:
        console.print(f"no task: no test of {found.name} notices any mutation")
        sys.exit(1)
