"""Which objective and correction survive a noisy, stale engine: small trials of each, on the real stack.

    .venv/bin/python benchmarks/stability.py                     what fits in an hour; it begins with an estimate
    .venv/bin/python benchmarks/stability.py --only 'noise-*'    patterns of CONDITION/METHOD/SEED; '*' is everything

A condition is an engine (bfloat16, or float32 with noise in its weights, under a learner in float32), a staleness and a
task; a method is what a recipe says of learning. All trials of a task start from the same supervised weights, and train
on 32 episodes a step: single ones, or 4 groups of 8. A seed is a repetition, for an engine's sampling has none.

Invariant: a trial's line in OUT/results.jsonl is written when it is over, so the same command goes on where it was
interrupted. One engine and one Redis serve trial after trial: each begins with an empty buffer and goes on with the
engine's version numbers, which only grow. A learner that breaks is a result; what breaks before its first step is an
error. Every wait has a deadline, and no process outlives this one (`deploy.processes`).

The curves need matplotlib (of the extra `benchmark`); without it there is the table, and the same command draws later.
"""

import argparse
import asyncio
import fnmatch
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.buffer import read_archive, write_archive
from argosy.deploy import cold_start, recipe
from argosy.deploy.paths import RunPaths, write_whole
from argosy.deploy.processes import Process, RunFailed, python
from argosy.deploy.recipe import Recipe
from argosy.deploy.supervisor import DRAIN_SECONDS, Supervisor

HERE = Path(__file__).parent
EVALUATED = 128  # held-out episodes, after each trial and before the first
SIGMA = 0.1  # of the noise: mismatch_k3 is 0.009 before anything is stale; that of bfloat16 is 0.00002
GOOD, FADED = 0.6, 0.02  # success from which a policy can fall, and the entropy below which it has stopped exploring
SMOOTH = 5  # steps
COLD_SECONDS, BREAKS_SECONDS = 3600.0, 180.0  # patience with the supervised stage, and for a batch
# What it took on two cores, by level: seconds of a cold start, of a batch, and of a trial besides its batches.
COLD, BATCH, BESIDES = {1: 150.0, 2: 300.0}, {1: 1.8, 2: 4.5}, {1: 20.0, 2: 25.0}

GROUPS = {"buffer.batch_size": 4, "buffer.group_size": 8, "learner.advantage": {"name": "grpo"}, "learner.value": None}
METHODS: dict[str, dict[str, Any]] = {  # what is not said is the demo's: dis within 0.5 and 5, and its learning rates
    "grpo": GROUPS | {"learner.objective": {"name": "grpo"}},
    "grpo+tis": GROUPS | {"learner.objective": {"name": "grpo"}, "learner.correction": {"name": "tis"}},
    "grpo+icepop": GROUPS | {"learner.objective": {"name": "grpo"}, "learner.correction": {"name": "icepop"}},
    "gspo": GROUPS | {"learner.objective": {"name": "gspo"}, "learner.minibatches": 4},
    "dis": GROUPS,
    "sao": {"preset": "sao", "learner.critic.warmup": 0},  # its value stage comes first, and is not counted as steps
}
VALUE_BATCHES = {"sao": 20}


@dataclass(frozen=True)
class Condition:
    name: str
    dtype: str = "float32"
    sigma: float = 0.0
    staleness: int | None = None
    """How old batches are made to be; None: as old as they become, up to 4."""
    level: int = 1
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: int = 1
    """At least so many."""


CONDITIONS = [
    *(Condition(f"bf16-{k}", dtype="bfloat16", staleness=k) for k in (0, 2, 8)),
    *(Condition(f"noise-{k}", sigma=SIGMA, staleness=k) for k in (0, 2, 8)),
    Condition("long", level=2, methods=("grpo", "sao"), seeds=2),
]
AN_HOUR = ["bf16-0/*", "bf16-8/*", "noise-8/*", "long/*"]


@dataclass(frozen=True)
class Trial:
    condition: Condition
    method: str
    seed: int
    steps: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.condition.name}/{self.method}/{self.seed}"

    @property
    def engine(self) -> str:
        """Trials with the same one share it."""
        return f"engine-{self.condition.dtype}-{self.condition.sigma:g}-level{self.condition.level}"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.out / "trials" / self.name)

    @property
    def seconds(self) -> float:
        """What it should take."""
        batches = self.steps + VALUE_BATCHES.get(self.method, 0) + (self.condition.staleness or 0)
        return BESIDES[self.condition.level] + BATCH[self.condition.level] * batches

    def recipe(self) -> tuple[Recipe, RunPaths]:
        """Its recipe, and the folder of its engine and Redis."""
        condition = self.condition
        changes = {
            "model": {"path": str(supervised(condition.level, self.out))},
            "demonstrations": 0,
            "engine.dtype": condition.dtype,
            "buffer.eta": 4 if condition.staleness is None else condition.staleness,
            "learner.supervised": None,
            "learner.stop": {"steps": self.steps},
            "learner.checkpoint_every": 10_000,
            "learner.claim_seconds": BREAKS_SECONDS,
            "learner.seed": self.seed,
        }
        return load(self.engine, condition.level, self.out, changes | METHODS[self.method])

    def steps_done(self) -> list[dict[str, Any]]:
        """What the learner recorded of each policy step."""
        lines = self.paths.metrics.read_text().splitlines() if self.paths.metrics.exists() else []
        return [record for record in map(json.loads, lines) if record["stage"] == "policy"]

    def success(self) -> list[float]:
        """Of the training batches, step by step, smoothed."""
        rewards = [step["reward"] for step in self.steps_done()]
        return [statistics.mean(rewards[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(rewards))]


def load(name: str, level: int, out: Path, changes: Mapping[str, Any]) -> tuple[Recipe, RunPaths]:
    """The demo's recipe, with changes."""
    sizes = {"actor.context_tokens": 768 * level, "engine.max_total_tokens": 32768 * level}
    task = {"tasks.0.kwargs": {"level": level}, "evaluation.0.kwargs": {"level": level, "split": "held_out"}}
    changed = {"name": name, **sizes, **task, **changes}
    return recipe.load("demo", [f"{key}={json.dumps(value)}" for key, value in changed.items()], out)


def supervised(level: int, out: Path) -> Path | None:
    """The weights that a level's trials start from, once they are made."""
    return max((out / f"base-{level}" / "weights").glob("v*"), default=None)


# The processes


async def silent(_: Supervisor) -> None: ...


class ColdStart(Supervisor):
    """A model from nothing, and demonstrations to imitate, up to its first weights."""

    async def _do_stages(self) -> None:
        await self._start_redis()
        await cold_start.make_model(self.recipe, self.paths, self._keep)
        await cold_start.demonstrate(self.recipe, self.paths, self._keep)
        if self.recipe.tasks[0].kwargs["level"] > 1:  # who imitates all of the clumsy expert there hardly ever succeeds
            played = [archived.trajectory for archived in read_archive(self.paths.demonstrations)]
            write_archive(self.paths.demonstrations, [one for one in played if one.reward == 1.0])
        self._start_learner()
        await self._until(self._weights.latest, COLD_SECONDS, "the learner")
        await self._stop("learner", DRAIN_SECONDS)
        self._enter("done")


class Laboratory(Supervisor):
    """One engine, and the trials that it serves one after the other."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        super().__init__(*trials[0].recipe(), silent)
        self._trials = trials
        self._running: dict[str, asyncio.Task[int]] = {}

    async def _do_stages(self) -> None:
        await self._start_redis()
        before = self.paths.root / "before.json"
        for trial in self._trials:
            self._enter(trial.name)
            self._empty_buffer()
            await self._start_engine(trial.condition.sigma)
            if not before.exists():
                await self._evaluate_to(before, self.recipe)
            result = await self._try(trial, json.loads(before.read_text())["success"])
            with (trial.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            told = ("trial", "ended", "collapsed", "before", "after", "seconds")
            print(json.dumps({name: result[name] for name in told}), flush=True)
        self._enter("done")

    async def _try(self, trial: Trial, before: float) -> dict[str, Any]:
        shutil.rmtree(trial.paths.root, ignore_errors=True)
        begun, after, ended = time.monotonic(), None, "finished"
        try:
            async with asyncio.timeout(300 + 10 * trial.seconds):
                after = await self._train(trial)
        except (RunFailed, TimeoutError) as error:
            if not trial.steps_done():
                raise
            ended = f"diverged: {(str(error) or 'out of time').splitlines()[-1]}"
        finally:
            for name in ("actor-0", "learner", "evaluate"):
                await self._stop(name, DRAIN_SECONDS)
        for folder in ("weights", "checkpoints"):
            shutil.rmtree(trial.paths.root / folder, ignore_errors=True)
        of = {"trial": trial.name, "condition": trial.condition.name, "method": trial.method, "seed": trial.seed}
        ends = {"steps": trial.steps, "ended": ended, "before": before, "after": after}
        dropped = sum(self._buffer.ledger().dropped.values())
        return of | ends | judge(trial, ended) | {"dropped": dropped, "seconds": round(time.monotonic() - begun, 1)}

    async def _train(self, trial: Trial) -> float:
        """Trains, and returns the success on held-out tasks afterwards."""
        (changed, _), paths = trial.recipe(), trial.paths
        paths.configs.mkdir(parents=True)
        config = paths.configs / "learner.json"
        write_whole(config, json.dumps(changed.learner_config(paths)))
        program = ["-m", "argosy.learner"] if trial.condition.staleness is None else [str(HERE / "late_learner.py")]
        learner = Process("learner", [sys.executable, *program, str(config)], paths.logs / "learner.log")
        done = self._begin(learner)
        await self._beside(self._newest_weights(), "learner", "engine-0")
        self._begin(self._role("actor-0", "worker", changed, paths))
        if await self._beside(done, "actor-0", "engine-0") != 0:
            raise RunFailed(learner.last_words())
        await self._stop("actor-0", DRAIN_SECONDS)
        await self._newest_weights()
        await self._evaluate_to(paths.root / "after.json", changed)
        return json.loads((paths.root / "after.json").read_text())["success"]

    async def _evaluate_to(self, out: Path, of: Recipe) -> None:
        arguments = ("--source", of.evaluation[0].name, "--episodes", str(EVALUATED), "--out", str(out))
        process = self._role("evaluate", "evaluate", of, RunPaths(out.parent), *arguments)
        if await self._beside(self._begin(process), "engine-0") != 0:
            raise RunFailed(process.last_words())

    def _empty_buffer(self) -> None:
        newest = self._buffer.next_version()
        self._buffer.forget()
        self._buffer.next_version(newest)  # an engine takes nothing that is not newer than what it has

    async def _start_engine(self, sigma: float) -> None:
        """Unless it runs: a policy that diverged may have taken it along."""
        if "engine-0" in self._running and not self._running["engine-0"].done():
            return
        process = self._role("engine-0", "engine", self.recipe, self.paths)
        if sigma:
            process.command = [sys.executable, str(HERE / "noisy_engine.py"), process.command[-1], str(sigma)]
        self._begin(process)
        seconds = self.recipe.engine.start_seconds
        await self._beside(self._until(self._weights.engines, seconds, "the engine"), "engine-0")

    def _role(self, name: str, role: str, of: Recipe, paths: RunPaths, *arguments: str) -> Process:
        paths.configs.mkdir(parents=True, exist_ok=True)
        config = paths.configs / f"{name}.json"
        write_whole(config, of.actor_config(paths, name).model_dump_json())
        return python(name, "argosy.actors", role, str(config), *arguments, log=paths.logs / f"{name}.log")

    def _begin(self, process: Process) -> asyncio.Task[int]:
        """Starts a process that is not started again when it dies."""
        self.processes[process.name] = process
        self._running[process.name] = asyncio.create_task(process.run(), name=process.name)
        return self._running[process.name]

    async def _beside(self, work: "asyncio.Task[int] | Coroutine[Any, Any, Any]", *needed: str) -> Any:
        """Waits for `work`; RunFailed as soon as one of the processes it needs has ended."""
        task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
        others = [self._running[name] for name in needed]
        try:
            await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                gone = next(other for other in others if other.done()).get_name()
                raise RunFailed(f"{gone} ended. {self.processes[gone].last_words()}")
            return task.result()
        finally:
            task.cancel()


# What came of them


def judge(trial: Trial, ended: str) -> dict[str, Any]:
    """What the policy steps of a trial say about its stability."""
    steps = trial.steps_done()
    success = trial.success()[SMOOTH - 1 :] or trial.success()[-1:]
    risen = [index for index, value in enumerate(success) if value >= GOOD][:1]

    def of(name: str, what: Callable[[list[float]], float] = statistics.mean) -> float | None:
        """`what` of the steps that have this number."""
        values = [step[name] for step in steps if step.get(name) is not None]
        return what(values) if values else None

    entropy = of("entropy", lambda values: values[-1])
    faded = entropy is not None and entropy < FADED and success[-1] < GOOD
    means = ("mismatch_k3", "masked_share", "clip_share", "corrected_share", "staleness_mean")
    return {
        "policy_steps": len(steps),
        "best": max(success),
        "last": success[-1],
        "lowest": min(success[risen[0] :]) if risen else None,
        "collapsed": ended != "finished" or faded or success[-1] < max(success) / 2,
        "entropy": entropy,
        **{name: of(name) for name in means},
        "staleness_max": of("staleness_max", max),
        "grad_norm_max": of("grad_norm", max),
    }


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each condition and method, means over its seeds."""
    shown = {
        "before": ".1%", "after": ".1%", "best": ".1%", "lowest": ".1%", "mismatch_k3": ".2g", "staleness_mean": ".1f",
        "staleness_max": ".0f", "masked_share": ".1%", "clip_share": ".1%", "corrected_share": ".1%",
        "grad_norm_max": ".2g", "seconds": ".0f",
    }  # fmt: skip
    yield f"| condition | method | seeds | collapsed | {' | '.join(shown).replace('_', ' ')} |"
    yield f"|---|---|{'---:|' * (2 + len(shown))}"
    for kind, group in itertools.groupby(results, lambda result: (result["condition"], result["method"])):
        rows = list(group)
        cells = [*kind, str(len(rows)), str(sum(row["collapsed"] for row in rows))]
        for name, form in shown.items():
            values = [row[name] for row in rows if row[name] is not None]
            cells.append(format(statistics.mean(values), form) if values else "-")
        yield f"| {' | '.join(cells)} |"


def draw(trials: Sequence[Trial], results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """A panel for each condition, a colour for each method: a thin line for each seed, which ends in an x if the policy
    collapsed, and their mean."""
    try:
        import matplotlib
    except ImportError:
        print("No curves without matplotlib: `pip install matplotlib`, and the same command draws them.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(trial.condition for trial in trials))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = pyplot.figure(figsize=(5 * columns, 3.4 * rows))
    for place, condition in enumerate(panels, 1):
        axis = figure.add_subplot(rows, columns, place)
        axis.set(title=condition.name, xlabel="policy step", ylabel="success in training", ylim=(0, 1))
        axis.grid(alpha=0.3)
        for color, method in enumerate(METHODS):
            curves = {t.name: t.success() for t in trials if (t.condition, t.method) == (condition, method)}
            for name, curve in curves.items():
                end = [len(curve) - 1] if results[name]["collapsed"] else []
                look: dict[str, Any] = {
                    "color": f"C{color}",
                    "linewidth": 0.7,
                    "alpha": 0.6,
                    "marker": "x",
                    "markevery": end,
                }
                axis.plot(range(1, len(curve) + 1), curve, **look)
            if curves:
                mean = [statistics.mean(seeds) for seeds in zip(*curves.values())]
                axis.plot(range(1, len(mean) + 1), mean, color=f"C{color}", linewidth=1.8, label=method)
        axis.legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    print(f"\nCurves: {file}")


def read(out: Path, steps: int) -> dict[str, dict[str, Any]]:
    """The results of trials of so many steps, by name."""
    file = out / "results.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return {line["trial"]: line for line in lines if line["steps"] == steps}


def run(supervisor: Supervisor) -> None:
    if asyncio.run(supervisor.run()) == "interrupted":
        sys.exit("interrupted: the same command goes on")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which objective and correction survive a noisy, stale engine.")
    parser.add_argument("--only", action="append", help="trials by CONDITION/METHOD/SEED, with * for anything")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions of each trial (default 1; 2 of long ones)")
    parser.add_argument("--steps", type=int, default=40, help="policy steps of each trial (default 40)")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"), help="default runs/stability")
    options = parser.parse_args()
    out, only = options.out.resolve(), options.only or AN_HOUR
    trials = [
        Trial(condition, method, seed, options.steps, out)
        for condition in CONDITIONS
        for method in condition.methods
        for seed in range(max(options.seeds, condition.seeds))
    ]
    trials = [trial for trial in trials if any(fnmatch.fnmatch(trial.name, pattern) for pattern in only)]
    if not trials:
        parser.error(f"no trial is like {' or '.join(only)}; conditions: {', '.join(c.name for c in CONDITIONS)}")
    left = [trial for trial in trials if trial.name not in read(out, options.steps)]
    cold = [level for level in COLD if supervised(level, out) is None and any(t.condition.level == level for t in left)]
    seconds = sum(trial.seconds for trial in left) + sum(COLD[level] for level in cold)
    print(f"{len(trials)} trials, {len(left)} of them to do: about {seconds / 60:.0f} minutes on two cores", flush=True)
    try:
        for level in cold:
            run(ColdStart(*load(f"base-{level}", level, out, {}), silent))
        for _, group in itertools.groupby(left, lambda trial: trial.engine):
            run(Laboratory(list(group)))
    except RunFailed as error:
        sys.exit(f"stability: {error}")
    results = read(out, options.steps)
    print("", *table([results[trial.name] for trial in trials]), sep="\n")
    draw(trials, results, out / "curves.png")


if __name__ == "__main__":
    main()
