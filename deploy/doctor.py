"""Examinations of a setup before it is trained with: `argosy doctor`.

Invariant: an examination plays real episodes with the recipe's own engines, environments and learner, in a folder of
its own, and trains nothing. A run of the same recipe is left alone; its newest weights are examined, if it has any.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from . import cold_start
from .paths import RunPaths
from .processes import python
from .recipe import ModelSettings, Recipe
from .supervisor import ENGINE_STOP_SECONDS, Supervisor

# The largest |learner - engine| of a token, in nats, and the mean k3 below which both are the same for training.
ROUNDING, AGREEMENT = 1e-3, 1e-6
# Above this share of masked tokens a correction hides a fault instead of correcting rounding.
TOLERABLE = 0.01
EVEN = 0.02  # an episode's probability within 1 +- this is the same


def prepare(recipe: Recipe, paths: RunPaths) -> tuple[Recipe, RunPaths]:
    """The recipe of the examination: the same, but for its name, its own Redis, and the weights that a run has made."""
    mine = RunPaths(paths.root.with_name(f"{paths.root.name}-doctor"))
    shutil.rmtree(mine.root, ignore_errors=True)
    written = sorted((paths.root / "weights").glob("v*"))
    model = ModelSettings(path=written[-1]) if written else recipe.model
    buffer = recipe.buffer.model_copy(update={"run": mine.root.name, "url": mine.redis_url})
    return recipe.model_copy(update={"name": mine.root.name, "model": model, "buffer": buffer}), mine


class Mismatch(Supervisor):
    """Plays about `episodes` episodes of the tasks, and compares what engine and learner say about their tokens."""

    def __init__(self, recipe: Recipe, paths: RunPaths, episodes: int) -> None:
        super().__init__(recipe, paths, _say)
        self._episodes = episodes
        self.found: dict[str, Any] = {}
        """See learner/mismatch.py."""

    async def _do_stages(self) -> None:
        recipe, paths = self.recipe, self.paths
        await self._start_redis()
        self._enter("model")
        await cold_start.make_model(recipe, paths, self._keep)
        self._start_engines()
        self._enter("engine")
        seconds = recipe.engine.start_seconds
        await self._until(lambda: len(self._weights.engines()) >= recipe.processes.engines, seconds, "an engine")
        self._enter("episodes")
        rollouts = paths.root / "rollouts"
        rollouts.mkdir(exist_ok=True)
        for source in recipe.tasks:
            await self._play(source.name, -(-self._episodes // len(recipe.tasks)), rollouts / f"{source.name}.archive")
        await asyncio.gather(*(self._stop(name, ENGINE_STOP_SECONDS) for name in self.processes if "engine" in name))
        self._enter("learner")
        out = paths.root / "mismatch.json"
        await self._keep(self._learner("argosy.learner.mismatch", str(rollouts), str(out)))
        self.found = json.loads(out.read_text())
        self._enter("done")

    async def _play(self, source: str, episodes: int, archive: Path) -> None:
        config = self._config("rollouts", self.recipe.actor_config(self.paths, "rollouts").model_dump_json())
        out = archive.with_suffix(".json")
        arguments = ("--source", source, "--episodes", str(episodes), "--out", str(out), "--archive", str(archive))
        log = self.paths.logs / "rollouts.log"
        await self._keep(python("rollouts", "argosy.actors", "evaluate", config, *arguments, log=log, may_end=True))


async def _say(supervisor: Supervisor) -> None:
    said = ""
    while True:
        if supervisor.stage != said:
            said = supervisor.stage
            print(f"  {said} ...", flush=True)
        await asyncio.sleep(0.2)


def describe(found: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> Iterator[RenderableType]:
    """The numbers as tables, and the verdict."""
    yield f"{found['tokens']} sampled tokens of {found['episodes']} episodes, the same weights on both sides"
    spread = Table(title="|learner - engine| of a token's log-probability, in nats", title_justify="left")
    for name in ("median", "90 %", "99 %", "99.9 %", "most"):
        spread.add_column(name, justify="right")
    spread.add_row(*(f"{value:.2g}" for value in found["quantiles"].values()))
    yield spread
    low, middle, high = found["episode_ratio"].values()
    yield (
        f"mean {found['bias']:+.2g}, k3 {found['mismatch_k3']:.2g}, effective sample size {found['ess']:.4f}; "
        f"probability of a whole episode, learner / engine: {low:.3f} to {high:.3f} (1 % to 99 %, median {middle:.3f})"
    )
    touched = Table(title="what a correction would mask, cap or clip before anything is stale", title_justify="left")
    touched.add_column("correction")
    touched.add_column("share of tokens", justify="right")
    for name, share in found["touched"].items():
        touched.add_row(name, f"{share:.3%}")
    yield touched
    worst = Table(title="the tokens they disagree about most", title_justify="left")
    for name in ("engine", "learner", "token", "after"):
        worst.add_column(name)
    for one in found["worst"]:
        shown = (
            f"{one['engine']:.4f}",
            f"{one['learner']:.4f}",
            repr(decode([one["token"]])),
            repr(decode(one["context"])),
        )
        worst.add_row(*(Text(cell) for cell in shown))
    yield worst
    yield Text(verdict(found), style="bold")


def verdict(found: Mapping[str, Any]) -> str:
    """Which correction is needed, and why."""
    most, touched, k3 = found["quantiles"]["1.0"], found["touched"], found["mismatch_k3"]
    low, _, high = found["episode_ratio"].values()
    by_token = max(touched["icepop"], touched["dis"])
    if touched["icepop"] > TOLERABLE or k3 > TOLERABLE:
        return (
            f"Find the cause before training: {touched['icepop']:.1%} of the tokens are outside [0.5, 2], k3 is "
            f"{k3:.2g}. That is more than rounding. Compare precision, temperature, chat template and kernels; the "
            "worst tokens say where to look."
        )
    if most < ROUNDING and k3 < AGREEMENT:
        return (
            f"Engine and learner agree to {most:.1g} nats. The engine itself needs no correction. For what ages within "
            "eta take dis, or ppo and its kin with correction icepop: they mask nothing that is fresh."
        )
    if low > 1 - EVEN and high < 1 + EVEN:
        return (
            "The difference is small and evens out over an episode. A correction by token is enough: dis, or icepop or "
            f"tis with another objective. They touch {by_token:.2%} of what is fresh."
        )
    return (
        "The difference is small by token and adds up over an episode: its probability is off by a factor of "
        f"{low:.3g} to {high:.3g}. Correct by token (dis, icepop: they touch {by_token:.2%} of what is fresh). By "
        f"episode, sequence-mask would mask {touched['sequence-mask']:.0%} of it, and gspo to the engine clip "
        f"{touched['gspo, old: engine']:.0%}: take gspo to the learner."
    )
