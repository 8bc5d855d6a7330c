"""What a user sees while a run goes on: a live screen in a terminal, a plain line now and then elsewhere.

Invariant: the view only reads (the run's folder, the buffer's ledger); a view that fails ends itself with a line in the
log, never the run.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..buffer import BufferError, Ledger, ReplayBuffer
from .paths import RunPaths
from .progress import Progress, Record, evaluations
from .recipe import Recipe

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger(__name__)

SCREEN_SECONDS, LINE_SECONDS = 0.5, 5.0
LEDGER_SECONDS = 1.0
RATE_SECONDS = 15.0  # rates are means over so long
RESTART_SECONDS = 60.0  # how long a restart is shown
PANEL_WIDTH = 84
CURVE_HEIGHT, CURVE_WIDTH = 7, PANEL_WIDTH - 16
BLOCKS = " ▁▂▃▄▅▆▇█"
DONE, NOW, LATER = "✔", "▶", "·"
PLAIN = {  # what a plain line tells of the learner's newest step
    "loss": "loss",
    "reward": "reward",
    "explained_variance": "explained variance",
    "staleness_max": "staleness",
    "version": "version",
}


async def watch(supervisor: "Supervisor", console: Console | None = None) -> None:
    """Shows the run until it is cancelled."""
    try:
        console = console or Console()
        screen = Screen(supervisor, console)
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, transient=False) as live:
                try:
                    while True:
                        await screen.update()
                        live.update(screen.render(), refresh=True)
                        await asyncio.sleep(SCREEN_SECONDS)
                finally:
                    screen.progress.update()
                    live.update(screen.render(), refresh=True)
        else:
            while True:
                await screen.update()
                screen.print_line()
                await asyncio.sleep(SCREEN_SECONDS)
    except Exception:
        log.exception("the view stopped; the run goes on")


class Screen:
    """One view of one run."""

    def __init__(self, supervisor: "Supervisor", console: Console) -> None:
        self._supervisor, self._console = supervisor, console
        self._recipe: Recipe = supervisor.recipe
        self._paths: RunPaths = supervisor.paths
        self._begun = time.time()
        self.progress = Progress(supervisor.paths)
        self._buffer = ReplayBuffer(self._recipe.buffer.model_copy(update={"patience_seconds": LEDGER_SECONDS}))
        self._ledger_read = 0.0
        self._redis_full = False
        self._engine_tokens: list[tuple[float, int]] = []
        self._said_at = 0.0

    async def update(self) -> None:
        self.progress.update()
        now = time.time()
        self._engine_tokens = [*self._engine_tokens, (now, self.progress.engine_tokens())][-200:]
        if now > self._ledger_read + LEDGER_SECONDS and self._supervisor.redis_answers:
            self._ledger_read = now
            try:
                self.progress.ledger = await asyncio.to_thread(self._buffer.ledger)
                self._redis_full = await asyncio.to_thread(self._buffer.pressed)
            except BufferError as error:  # Redis is being restarted; the next look will do
                log.warning("no ledger for the view: %s", error)

    # The screen

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._stages()]
        if self.progress.curve:
            parts.append(Text("success of the newest episodes", style="dim"))
            parts.append(_curve([value for _, value in self.progress.curve]))
        parts.append(self._numbers())
        if self.progress.ledger is not None and (waiting := self._waiting(self.progress.ledger)):
            parts.append(Text(f"          {waiting}", style="dim"))
        parts += [Text(f"⚠ {line}", style="yellow") for line in self._warnings()]
        elapsed = _duration(time.time() - self._begun)
        return Panel(Group(*parts), title=f"argosy · {self._recipe.name}", subtitle=elapsed, width=PANEL_WIDTH)

    def _stages(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, done, total, note in self.stages():
            mark = DONE if total and done >= total else NOW if self._is_current(name) else LATER
            bar = ProgressBar(total=max(total, 1), completed=min(done, total), width=30)
            table.add_row(mark, name, bar, f"{done}/{total}" if total > 1 else "", Text(note, style="dim"))
        return table

    def stages(self) -> list[tuple[str, int, int, str]]:
        """(name, done, total, note) of each stage, in order."""
        learner, found = self._recipe.learner, []
        if self._recipe.model.scratch:
            found.append(("model", int(self._paths.model.exists()), 1, ""))
        if self._recipe.demonstrations:
            found.append(("demonstrations", int(self._paths.demonstrations.exists()), 1, ""))
        for name, settings in (("supervised", learner.supervised), ("value", learner.value)):
            if settings is not None:
                total = settings.steps if hasattr(settings, "steps") else settings.batches
                found.append((name, len(self.progress.steps[name]), total, self._note(name, total)))
            if name == "supervised":
                found += self._evaluation("before")
        total = learner.stop.steps
        finished = self._supervisor.stage in ("evaluation after", "done")
        steps = len(self.progress.steps["policy"])
        note = f"{steps} steps" if finished else self._note("policy", total)
        found.append(("policy", total if finished else steps, total, note))
        return [*found, *self._evaluation("after")]

    def _evaluation(self, when: str) -> list[tuple[str, int, int, str]]:
        sources = self._recipe.evaluation
        done = evaluations(self._paths, when, sources)
        note = ", ".join(f"{one['source']} {one['success']:.0%}" for one in done)
        return [(f"evaluation {when}", len(done), len(sources), note)] if sources else []

    def _note(self, stage: str, total: int) -> str:
        records = self.progress.series(stage)
        if not records or len(records) >= total:
            return ""
        recent = [record for record in records if record["time"] > time.time() - 4 * RATE_SECONDS]
        pace = (recent[-1]["time"] - recent[0]["time"]) / (len(recent) - 1) if len(recent) > 1 else None
        left = "" if pace is None else f"{_duration(pace * (total - len(records)))} left"
        if stage == "policy":
            return f"at most {left}" if left else ""
        loss = records[-1].get("loss")
        return left if loss is None else f"loss {loss:.3f}  {left}"

    def _numbers(self) -> Table:
        last = self.progress.latest()
        table = Table.grid(padding=(0, 2))
        actors = [actor.last for actor in self.progress.actors.values()]
        if actors:
            engine = self._rate()
            table.add_row(
                "actors",
                f"{sum(a['running'] for a in actors)} running",
                f"{sum(a['episodes_per_second'] for a in actors):.0f} episodes/s",
                f"engine {engine:,.0f} tokens/s",
            )
        if last:
            explained = _number(last, "explained_variance", "explained variance")
            table.add_row("learner", f"step {last['step']}", self._learner_rate(), explained)
        if "version" in last:
            mean, most = last.get("staleness_mean", 0), last.get("staleness_max", 0)
            staleness = f"staleness {mean:.1f} (max {most:.0f} of {self._recipe.buffer.eta})"
            table.add_row("versions", f"policy {last['version']}", staleness, _number(last, "masked_share", "masked"))
        ledger = self.progress.ledger
        if ledger is not None and ledger.created:
            dropped = f"dropped {sum(ledger.dropped.values())}  lost {ledger.lost}"
            table.add_row("ledger", f"created {ledger.created}", f"trained {ledger.trained}", dropped)
        return table

    def _waiting(self, ledger: Ledger) -> str:
        """The attempts that are not trained, by their state or by the reason they were dropped for."""
        counts = {**ledger.live, **{f"dropped as {reason}": n for reason, n in ledger.dropped.items()}}
        return "  ".join(f"{name} {n}" for name, n in counts.items() if n)

    def _rate(self) -> float:
        now, tokens = self._engine_tokens[-1]
        past = [point for point in self._engine_tokens if point[0] >= now - RATE_SECONDS]
        return (tokens - past[0][1]) / (now - past[0][0]) if now > past[0][0] else 0.0

    def _learner_rate(self) -> str:
        records = [record for _, record in self.progress.records() if record["time"] > time.time() - RATE_SECONDS]
        return f"{sum(record.get('tokens') or 0 for record in records) / RATE_SECONDS:,.0f} tokens/s"

    def _warnings(self) -> Sequence[str]:
        recently = time.time() - RESTART_SECONDS
        restarts = [note for note in self.progress.journal if note["event"] == "restarted" and note["time"] > recently]
        alarms = self.progress.alarms() if self._supervisor.stage == "training" else []
        return [
            *("{process} ended with {reason} and was started again".format(**note) for note in restarts),
            *("{name} is {value:.3g}, limit {limit:.3g}: {hint}".format(**alarm) for alarm in alarms),
            *["Redis is nearly full: actors wait until a checkpoint frees what is trained"] * self._redis_full,
        ]

    def _is_current(self, name: str) -> bool:
        stage = self._supervisor.stage
        last = self.progress.latest().get("stage", "supervised" if self._recipe.learner.supervised else "value")
        return name == stage or (stage in ("learner", "training") and name == last)

    # Without a terminal

    def print_line(self) -> None:
        """A line every few seconds."""
        if time.time() < self._said_at + LINE_SECONDS:
            return
        self._said_at = time.time()
        last = self.progress.latest()
        words = [f"{_duration(time.time() - self._begun):>6}", self._supervisor.stage]
        if last and self._supervisor.stage in ("learner", "training"):
            words.append(f"{last['stage']} {last['step']}/{last.get('steps', '?')}")
            words += [_number(last, key, name) for key, name in PLAIN.items()]
        if self._supervisor.stage == "training" and self.progress.curve:
            words.append(f"success {self.progress.curve[-1][1]:.2f}")
        if self.progress.ledger is not None and self._supervisor.stage == "training":
            words.append(f"trained {self.progress.ledger.trained} lost {self.progress.ledger.lost}")
        words += [f"! {warning}" for warning in self._warnings()]
        self._console.print("  ".join(word for word in words if word), highlight=False, markup=False, soft_wrap=True)


def results(paths: RunPaths, numbers: Record) -> RenderableType:
    """The table at the end: before and after."""
    table = Table(title=f"argosy · {paths.root.name}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = numbers["evaluations"]["before"], numbers["evaluations"]["after"]
    for old, new in zip(before, after, strict=False):
        name = f"success, {old['source']} ({old['episodes']} episodes)"
        table.add_row(name, f"{old['success']:.1%}", f"{new['success']:.1%}")
        table.add_row("turns per episode", f"{old['turns']:.1f}", f"{new['turns']:.1f}")
        table.add_row("malformed calls", f"{old['invalid']:.1%}", f"{new['invalid']:.1%}")
    live, staleness = sum(numbers["live"].values()), numbers["mean_staleness"] or 0.0
    lines = [
        f"{numbers['rl_steps']} steps in {_duration(numbers['rl_seconds'])}; staleness {staleness:.1f} on average, "
        f"at most {numbers['max_staleness']:.0f} (bound {numbers['eta']})",
        f"{numbers['created']} attempts = {numbers['trained']} trained + {numbers['dropped']} dropped "
        f"+ {live} waiting; {numbers['lost']} lost",
        f"report: {paths.report}",
    ]
    return Group(table, *(Text(line) for line in lines))


def _curve(values: Sequence[float]) -> Text:
    """Values from 0 to 1 as columns of blocks, the newest at the right; more values than columns are averaged."""
    width = min(CURVE_WIDTH, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    columns = [_mean(values[begin:end]) for begin, end in itertools.pairwise(edges)]
    rows = []
    for row in range(CURVE_HEIGHT - 1, -1, -1):
        filled = (min(max(value * CURVE_HEIGHT - row, 0.0), 1.0) for value in columns)
        label = {CURVE_HEIGHT - 1: "100% ", 0: "  0% "}.get(row, "     ")
        rows.append(label + "".join(BLOCKS[round(part * 8)] for part in filled))
    rows[0] += f"  {values[-1]:.0%}"
    return Text("\n".join(rows), style="green")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(record: Record, key: str, name: str) -> str:
    value = record.get(key)
    return "" if value is None else f"{name} {value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
