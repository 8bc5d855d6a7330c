"""`argosy sandbox`: what sandboxes there are, and the end of those that nobody owns."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..envs import SandboxUnavailable
from ..envs.sandboxes import reaper
from ..envs.sandboxes.reaper import Held

sandbox_app = typer.Typer(no_args_is_help=True, help="Sandboxes on this machine, of all runs.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@sandbox_app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List sandboxes: of bubblewrap, and of the Docker engine at DOCKER_HOST."""
    found = reaper.held(_docker_answers())
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        Console().print(_table(found) if found else "No sandboxes.")


@sandbox_app.command("reap")
def reap(
    all_of: Annotated[str | None, typer.Option(metavar="RUN", help="Also all of this run, even in use.")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the sandboxes whose owner is gone or whose time is up."""
    removed = reaper.reap(all_of, _docker_answers())
    if as_json:
        print(json.dumps([asdict(one) for one in removed], indent=2))
    else:
        Console().print(_table(removed) if removed else "Nothing to remove.")


def _docker_answers() -> bool:
    from ..envs.sandboxes.docker_engine import engine

    try:
        return bool(engine().ping())
    except SandboxUnavailable as error:
        Console(stderr=True).print(f"Docker is left out: {str(error).partition('. ')[0]}", style="dim", highlight=False)
        return False


def _table(found: list[Held]) -> Table:
    table = Table()
    for name in ("sandbox", "id", "run", "owner", "image", "age", ""):
        table.add_column(name)
    for one in sorted(found, key=lambda one: (one.backend, one.run, -one.age)):
        age = f"{one.age / 3600:.1f} h" if one.age > 3600 else f"{one.age:.0f} s"
        name = one.id[:12] if one.backend == "docker" else one.id
        state = "abandoned" if one.abandoned else ""
        table.add_row(one.backend, name, one.run, str(one.owner or "elsewhere"), one.image, age, state)
    return table
