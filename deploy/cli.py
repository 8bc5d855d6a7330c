"""The `argosy` command."""

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, Group
from rich.table import Table
from tokenizers import Tokenizer
from typer.core import TyperGroup

from ..buffer import BufferError, Ledger, ReplayBuffer, Story
from ..envs.sandboxes.owners import RUN
from . import doctor
from .envs import envs_app
from .paths import RunPaths
from .processes import RunFailed, redis_server
from .recipe import Recipe, RecipeError, describe, load
from .sandboxes import sandbox_app
from .supervisor import AlreadyRunning, Supervisor, locked
from .tasks import tasks_app
from .view import results, watch

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train coding agents by asynchronous reinforcement learning.",
)


class _Ledger(TyperGroup):
    """`argosy ledger RECIPE` is `argosy ledger table RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["table", *args]
        return super().parse_args(ctx, args)


ledger_app = typer.Typer(cls=_Ledger, help="What became of every attempt of a run, or of one.")
app.add_typer(ledger_app, name="ledger")
doctor_app = typer.Typer(no_args_is_help=True, help="Examine a setup before training with it.")
app.add_typer(doctor_app, name="doctor")
app.add_typer(tasks_app, name="tasks")
app.add_typer(envs_app, name="envs")
app.add_typer(sandbox_app, name="sandbox")
RecipeName = Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that comes with Argosy.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, as key.path=value.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run of this name did.")]
ENGINE_AND_TRAINER = ("torch", "sglang", "megatron")
T = TypeVar("T")
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


@ledger_app.command("table")
def ledger_table(
    recipe: RecipeName = "demo",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print what became of every attempt of a run: created = trained + dropped + live."""
    found, stats = _ask(recipe, overrides, lambda buffer: (buffer.ledger(), buffer.stats()))
    if as_json:
        whole = {**asdict(found), "lost": found.lost, "balanced": found.balanced, "stats": stats}
        print(json.dumps(whole, indent=2))
    else:
        Console().print(Group(_ledger_table(found), *_staleness_table(stats["staleness_trained"])))


@ledger_app.command("show")
def ledger_show(
    attempt: Annotated[str, typer.Argument(help="For instance 17/0: the first attempt at task 17.")],
    recipe: RecipeName = "demo",
    overrides: Overrides = None,
    as_json: AsJson = False,
    save: Annotated[Path | None, typer.Option(help="Write what was kept aside of it to this file.")] = None,
) -> None:
    """Print everything that happened to one attempt."""
    story, stats, blob = _ask(
        recipe, overrides, lambda buffer: (buffer.story(attempt), buffer.stats(), buffer.aside(attempt))
    )
    if story is None:
        raise RunFailed(f"there is no attempt {attempt!r} in this run")
    if save:
        if blob is None:
            raise RunFailed(f"nothing is kept aside of attempt {attempt}: it is {story.state}")
        save.write_bytes(blob)
    failures = [failure for failure in stats["failures"] if failure["attempt"] == attempt]
    if as_json:
        print(json.dumps({**asdict(story), "failures": failures}, indent=2))
    else:
        print("\n".join([*_told(story), *(f"  try {f['tries']}: {f['reason']} {f['detail']}" for f in failures)]))


@doctor_app.command("mismatch")
def doctor_mismatch(
    recipe: RecipeName,
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option(help="How many episodes to play.", min=1)] = 64,
    as_json: AsJson = False,
) -> None:
    """Compare engine and learner on real rollouts of the model, and say which correction is needed and why."""
    _check_installed()
    logging.basicConfig(level=logging.ERROR)
    examined, paths = doctor.prepare(*load(recipe, overrides or ()))
    examination = doctor.Mismatch(examined, paths, episodes)
    if asyncio.run(examination.run()) == "interrupted":
        sys.exit(INTERRUPTED)
    if as_json:
        print(json.dumps(examination.found, indent=2))
        return
    tokenizer = Tokenizer.from_file(str((examined.model.path or paths.model) / "tokenizer.json"))
    for part in doctor.describe(examination.found, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)):
        Console().print(part)


def _check_installed() -> None:
    missing = [name for name in ENGINE_AND_TRAINER if find_spec(name) is None]
    if missing:
        raise RunFailed(f"{', '.join(missing)} not installed: this needs what `make install` installs")


def _train(recipe: Recipe, paths: RunPaths, fresh: bool) -> None:
    _check_installed()
    try:
        if fresh:
            _forget(recipe, paths)
        paths.logs.mkdir(parents=True, exist_ok=True)
        os.environ[RUN] = recipe.name  # whose the sandboxes are, of all processes to come
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


def _ask(recipe: str, overrides: list[str] | None, question: Callable[[ReplayBuffer], T]) -> T:
    """Asks a run's buffer, whether the run goes on or not."""
    logging.basicConfig(level=logging.ERROR)  # not that a Redis woken for this is still reading its file
    checked, paths = load(recipe, overrides or ())

    async def ask() -> T:
        async with _redis_of(checked, paths):
            return await asyncio.to_thread(question, ReplayBuffer(checked.buffer))

    return asyncio.run(ask())


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
        process = redis_server(paths.redis, paths.redis_socket, paths.logs / "redis.log")  # reads even if it is full
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
    """A row for each number there is, a column for each task source."""
    table = Table(title="created = trained + dropped + live", title_justify="left")
    columns = [*ledger.by_source.values(), ledger] if len(ledger.by_source) > 1 else [ledger]
    names = [*ledger.by_source, "all"] if len(columns) > 1 else list(ledger.by_source) or ["all"]
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("created", *(str(one.created) for one in columns))
    table.add_row("trained", *(str(one.trained) for one in columns))
    table.add_row("dropped", *(str(sum(one.dropped.values())) for one in columns))
    for reason in ledger.dropped:
        table.add_row(f"  {reason}", *(str(one.dropped.get(reason, 0)) for one in columns), style="dim")
    table.add_row("live", *(str(sum(one.live.values())) for one in columns))
    for state in ledger.live:
        table.add_row(f"  {state}", *(str(one.live[state]) for one in columns), style="dim")
    table.add_section()
    table.add_row("lost", *(str(one.lost) for one in columns))
    return table


def _staleness_table(found: dict[str, dict[float, int]]) -> list[Table]:
    """How far trained attempts lay behind, by quantile; in flight, in the queue, and in all."""
    if "total" not in found:
        return []
    table = Table(title="staleness of what was trained", title_justify="left")
    for name in ("", "median", "90 %", "most"):
        table.add_column(name, justify="right" if name else "left")
    for which in ("flight", "queue", "total", "flight_seconds", "queue_seconds"):
        if buckets := found.get(which):
            unit, below = ("s", "< ") if which.endswith("_seconds") else ("versions", "")
            row = (f"{below}{_quantile(buckets, q):g}" for q in (0.5, 0.9, 1.0))
            table.add_row(f"{which.removesuffix('_seconds')}, {unit}", *row)
    return [table]


def _quantile(buckets: dict[float, int], share: float) -> float:
    left = share * sum(buckets.values())
    for value, count in buckets.items():
        left -= count
        if left <= 0:
            return value
    return max(buckets)


def _told(story: Story) -> Iterator[str]:
    yield f"{story.attempt}  {story.task.id} (source {story.task.source}, seed {story.task.seed})  {story.state}"
    for event in story.events:
        yield f"{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M:%S}  {event.what}"
    for name, value in story.facts.items():
        yield f"  {name}: {value}"


def main() -> None:
    try:
        app()
    except (RecipeError, RunFailed, BufferError, OSError) as error:
        sys.exit(f"argosy: {error}")


if __name__ == "__main__":
    main()
