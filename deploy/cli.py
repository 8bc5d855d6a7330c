"""The `argosy` command."""

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..buffer import BufferError, Ledger, ReplayBuffer
from .paths import RunPaths
from .processes import RunFailed, redis_server
from .recipe import Recipe, RecipeError, describe, load
from .supervisor import AlreadyRunning, Supervisor, locked
from .view import results, watch

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train coding agents by asynchronous reinforcement learning.",
)
RecipeName = Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that comes with Argosy.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, as key.path=value.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run of this name did.")]
ENGINE_AND_TRAINER = ("torch", "sglang", "megatron")
INTERRUPTED = 130  # what a shell reports for Ctrl-C


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, fresh: Fresh = False) -> None:
    """Train by a recipe, everything on this machine; the same command goes on where it stopped."""
    _train(*load(recipe, overrides or ()), fresh)


@app.command()
def demo(overrides: Overrides = None, fresh: Fresh = False) -> None:
    """Train a small agent that repairs Python functions, from nothing, on a CPU."""
    _train(*load("demo", overrides or ()), fresh)


@app.command()
def config(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe with every setting resolved, and what each means."""
    print("\n".join(describe(load(recipe, overrides or ())[0])))


@app.command()
def ledger(
    recipe: RecipeName = "demo",
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what became of every attempt of a run: created = trained + dropped + live."""
    logging.basicConfig(level=logging.ERROR)  # not that a Redis woken for this is still reading its file
    found = asyncio.run(_ledger(*load(recipe, overrides or ())))
    if as_json:
        print(json.dumps({**asdict(found), "lost": found.lost, "balanced": found.balanced}, indent=2))
    else:
        Console().print(_ledger_table(found))


def _train(recipe: Recipe, paths: RunPaths, fresh: bool) -> None:
    missing = [name for name in ENGINE_AND_TRAINER if find_spec(name) is None]
    if missing:
        raise RunFailed(f"{', '.join(missing)} not installed: training needs what `make install` installs")
    try:
        if fresh:
            _forget(recipe, paths)
        paths.logs.mkdir(parents=True, exist_ok=True)
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(filename=paths.logs / "supervisor.log", format=line)
        supervisor = Supervisor(recipe, paths, watch)
        outcome = asyncio.run(supervisor.run())
    except OSError as error:  # a full disk does not say where it is
        raise RunFailed(f"the run in {paths.root} cannot go on: {error}") from error
    if outcome == "interrupted":
        learner = "all is saved" if supervisor.saved else "the learner was killed and goes on from its last checkpoint"
        print(f"Interrupted; {learner} in {paths.root}. The same command goes on from here.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    Console().print(results(paths, json.loads(paths.summary.read_text())))
    Console().print("This run is finished. To do it again from the start: --fresh", style="dim")


def _forget(recipe: Recipe, paths: RunPaths) -> None:
    with locked(recipe.name, paths):
        if recipe.buffer.url != paths.redis_url:
            ReplayBuffer(recipe.buffer).forget()
        shutil.rmtree(paths.root)


async def _ledger(recipe: Recipe, paths: RunPaths) -> Ledger:
    async with _redis_of(recipe, paths):
        return await asyncio.to_thread(ReplayBuffer(recipe.buffer).ledger)


@asynccontextmanager
async def _redis_of(recipe: Recipe, paths: RunPaths) -> AsyncIterator[None]:
    """The run's Redis; one that rests is woken for the moment."""
    if recipe.buffer.url != paths.redis_url:
        yield
        return
    if not paths.redis.exists():
        raise RunFailed(f"there is no run in {paths.root}")
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(recipe.name, paths))
        except AlreadyRunning:  # and so is its Redis
            yield
            return
        paths.redis_socket.unlink(missing_ok=True)  # of one that was killed
        process = redis_server(paths.redis, paths.redis_socket, paths.logs / "redis.log")
        running = asyncio.create_task(process.run())
        try:
            while not paths.redis_socket.exists() and not running.done():
                await asyncio.sleep(0.02)
            if running.done():
                raise RunFailed(f"Redis does not start. {process.last_words()}")
            yield
        finally:
            await process.stop(10)
            await running


def _ledger_table(ledger: Ledger) -> Table:
    table = Table(title="created = trained + dropped + live", title_justify="left")
    for column in ("source", "created", "trained", "dropped", "live"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, row in ledger.by_source.items():
        table.add_row(source, *(str(row[key]) for key in ("created", "trained", "dropped", "live")))
    total = (ledger.created, ledger.trained, sum(ledger.dropped.values()), sum(ledger.live.values()))
    table.add_section()
    table.add_row("all", *map(str, total))
    for reason, number in ledger.dropped.items():
        table.add_row(f"  {reason}", "", "", str(number), "")
    for state, number in ledger.live.items():
        table.add_row(f"  {state}", "", "", "", str(number))
    table.caption = f"{ledger.lost} lost"
    return table


def main() -> None:
    try:
        app()
    except (RecipeError, RunFailed, BufferError, OSError) as error:
        sys.exit(f"argosy: {error}")


if __name__ == "__main__":
    main()
