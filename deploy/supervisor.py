"""One run on one machine: starts what it needs, keeps it alive, takes it through its stages, ends it.

Invariant: the run's folder holds everything that matters, so the same command goes on where the last one stopped,
however it stopped; a stage whose result is there is not done again. One supervisor per run: the folder is locked.
After `run` returns or raises, no process of it is left.

What waits for whom: `stages` for one-shot processes and for the learner to end; `keep` (one task a process) for its
process to die, to start it again; the view for the clock.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import yaml

from ..buffer import Ledger, RedisUnavailable, ReplayBuffer, WeightLedger
from . import cold_start, report
from .paths import RunPaths, write_whole
from .processes import Process, RunFailed, python, redis_server
from .progress import Progress
from .recipe import Recipe, RecipeError

# The way out, ten seconds in all: actors and learner together, then engines, then Redis.
DRAIN_SECONDS, ENGINE_STOP_SECONDS, REDIS_STOP_SECONDS = 5.5, 1.5, 2.0
CALL_SECONDS = 1.0  # patience of one call to Redis; those who wait longer call again
FIRST_WEIGHTS_SECONDS = 24 * 3600.0  # the supervised stage may be long; the learner's death ends the wait anyway
REDIS_SECONDS = 60.0
POLL_SECONDS = 0.2
SHOW_CURSOR = b"\x1b[?25h\n"  # the view hides it

Outcome = Literal["finished", "interrupted"]
T = TypeVar("T")


class AlreadyRunning(RunFailed):
    """Another process has the run."""


class Supervisor:
    """Made with a checked recipe; `run` does the work once."""

    def __init__(
        self, recipe: Recipe, paths: RunPaths, view: Callable[["Supervisor"], Coroutine[Any, Any, None]]
    ) -> None:
        self.recipe, self.paths, self._view = recipe, paths, view
        self.stage = ""
        """What the run is doing now, for the view."""
        self.processes: dict[str, Process] = {}
        self.redis_answers = False
        """Whether there is a Redis to ask yet."""
        self.saved = True
        """False once the learner had to be killed on the way out: it goes on from its last checkpoint."""
        impatient = recipe.buffer.model_copy(update={"patience_seconds": CALL_SECONDS})
        self._buffer, self._weights = ReplayBuffer(impatient), WeightLedger(impatient)
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stages: asyncio.Task[None] | None = None
        self._interrupted = False

    async def run(self) -> Outcome:
        """Does what is left of the run. `RunFailed` says why it cannot be finished."""
        with locked(self.recipe.name, self.paths):
            self._keep_recipe()
            if self.paths.summary.exists():
                return "finished"
            view = asyncio.create_task(self._view(self))
            self._stages = asyncio.create_task(self._do_stages())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
            try:
                await self._watch()
            finally:
                await self._stop_all()
                view.cancel()
                await asyncio.gather(view, return_exceptions=True)
        outcome: Outcome = "finished" if self.stage == "done" else "interrupted"
        self.note(outcome)
        return outcome

    async def _do_stages(self) -> None:
        await self._start_redis()
        self._enter("model")
        await cold_start.make_model(self.recipe, self.paths, self._keep)
        self._start_engines()
        self._enter("demonstrations")
        await cold_start.demonstrate(self.recipe, self.paths, self._keep)
        self._enter("learner")
        learner = self._start_learner()
        await self._newest_weights()
        await self._evaluate("before")
        self._enter("training")
        actors = self._start_actors()
        await asyncio.wait([learner])
        learner.result()
        await asyncio.gather(*(self._stop(name, DRAIN_SECONDS) for name in actors))
        await self._evaluate("after")
        ledger = await self._until(self._buffer.ledger, REDIS_SECONDS, "Redis")
        await asyncio.to_thread(self._report, ledger)
        self._enter("done")

    async def _watch(self) -> None:
        """Waits for the stages; a process that cannot be kept alive ends them."""
        assert self._stages is not None
        while not self._stages.done():
            keepers = [task for task in self._keepers.values() if not task.done()]
            await asyncio.wait([self._stages, *keepers], timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in self._keepers.values():
                if task.done() and not task.cancelled() and task.exception() is not None:
                    self._stages.cancel()
                    raise task.exception()  # type: ignore[misc]
        with contextlib.suppress(asyncio.CancelledError):
            await self._stages

    # What is started

    async def _start_redis(self) -> None:
        if self.recipe.buffer.url == self.paths.redis_url:
            log = self.paths.logs / "redis.log"
            self._keep(redis_server(self.paths.redis, self.paths.redis_socket, log, self.recipe.buffer.memory_bytes))
        if not self.paths.identity.exists():
            write_whole(self.paths.identity, uuid.uuid4().hex)
        identity = self.paths.identity.read_text()

        def claimed() -> bool:
            self._buffer.claim_run(identity)
            return True

        self.redis_answers = await self._until(claimed, REDIS_SECONDS, "Redis")

    def _start_engines(self) -> None:
        for i in range(self.recipe.processes.engines):
            self._start_actor_role("engine", f"engine-{i}")

    def _start_actors(self) -> list[str]:
        return [self._start_actor_role("worker", f"actor-{i}") for i in range(self.recipe.processes.actors)]

    def _start_actor_role(self, role: str, name: str) -> str:
        config = self._config(name, self.recipe.actor_config(self.paths, name).model_dump_json())
        self._keep(python(name, "argosy.actors", role, config, log=self.paths.logs / f"{name}.log"))
        return name

    def _start_learner(self) -> asyncio.Task[None]:
        return self._keep(self._learner("argosy.learner"))

    def _learner(self, module: str, *arguments: str) -> Process:
        """The ranks of the learner, running `module`."""
        config = self._config("learner", json.dumps(self.recipe.learner_config(self.paths)))
        ranks = self.recipe.processes.learners
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m") if ranks > 1 else ()
        log = self.paths.logs / "learner.log"
        return python("learner", *torchrun, module, config, *arguments, log=log, may_end=True)

    async def _newest_weights(self) -> None:
        """Waits until the learner has published weights and every engine serves the newest."""
        newest = await self._until(self._weights.latest, FIRST_WEIGHTS_SECONDS, "the learner")

        def served() -> bool:
            versions = [engine.version for engine in self._weights.engines().values()]
            return sum(version >= newest.version for version in versions) >= self.recipe.processes.engines

        seconds = self.recipe.engine.start_seconds + self.recipe.engine.update_seconds
        await self._until(served, seconds, f"an engine serving version {newest.version}")

    async def _until(self, ready: Callable[[], T | None], seconds: float, who: str) -> T:
        """Polls until `ready` gives something; RunFailed after so many seconds."""
        deadline = time.monotonic() + seconds
        problem = ""
        while time.monotonic() < deadline:
            try:
                if found := await asyncio.to_thread(ready):
                    return found
            except RedisUnavailable as error:
                problem = f" ({error})"
            await asyncio.sleep(POLL_SECONDS)
        raise RunFailed(f"{who}: nothing came within {seconds:.0f} s{problem}; see {self.paths.logs}")

    async def _evaluate(self, when: str) -> None:
        for source in self.recipe.evaluation:
            out = self.paths.evaluation(when, source.name)
            if out.exists():
                continue
            self._enter(f"evaluation {when}")
            await self._newest_weights()
            name = f"evaluate-{when}"
            config = self._config(name, self.recipe.actor_config(self.paths, name).model_dump_json())
            arguments = ("--source", source.name, "--episodes", str(source.episodes), "--out", str(out))
            log = self.paths.logs / f"{name}.log"
            await self._keep(python(name, "argosy.actors", "evaluate", config, *arguments, log=log, may_end=True))

    def _report(self, ledger: Ledger) -> None:
        progress = Progress(self.paths)
        progress.update()
        progress.ledger = ledger
        report.write(self.recipe, self.paths, progress)

    def _config(self, name: str, text: str) -> str:
        self.paths.configs.mkdir(exist_ok=True)
        file = self.paths.configs / f"{name}.json"
        write_whole(file, text)
        return str(file)

    # How it is kept and ended

    def _keep(self, process: Process) -> asyncio.Task[None]:
        process.on_death = lambda name, reason: self.note("restarted", process=name, reason=reason)
        self.processes[process.name] = process
        self._keepers[process.name] = asyncio.create_task(process.keep(), name=process.name)
        return self._keepers[process.name]

    async def _stop(self, name: str, seconds: float) -> bool:
        return name not in self.processes or await self.processes[name].stop(seconds)

    async def _stop_all(self) -> None:
        """Those with something to save first, then those they save it to."""
        assert self._stages is not None
        self._stages.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # what it died of is raised by `_watch`
            await self._stages
        if self.stage != "done":
            self.stage = "stopping"
        last = [name for name in self.processes if name.startswith("engine-") or name == "redis"]
        first = [name for name in self.processes if name not in last]
        in_time = await asyncio.gather(*(self._stop(name, DRAIN_SECONDS) for name in first))
        self.saved = dict(zip(first, in_time)).get("learner", True)
        await asyncio.gather(*(self._stop(name, ENGINE_STOP_SECONDS) for name in last if name != "redis"))
        self.redis_answers = False
        await self._stop("redis", REDIS_STOP_SECONDS)
        for task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        if self.processes.get("redis"):
            self.paths.redis_socket.unlink(missing_ok=True)

    def _interrupt(self, number: signal.Signals) -> None:
        """First signal: finish the step, save, leave. Ctrl-C after that: leave at once."""
        if self._interrupted and number == signal.SIGINT:
            for process in self.processes.values():
                process.kill()
            self.paths.redis_socket.unlink(missing_ok=True)
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)
            os._exit(130)
        self._interrupted = True
        if self._stages is not None:
            self._stages.cancel()

    # The run's folder

    def _keep_recipe(self) -> None:
        """Writes the resolved recipe. With another one than before the run is not finished any more; with another
        model, or measured by other things than before training, it would not be the same run."""
        resolved = self.recipe.model_dump(mode="json")
        begun = yaml.safe_load(self.paths.recipe.read_text()) if self.paths.recipe.exists() else resolved
        measured = any(self.paths.evaluation("before", "x").parent.glob("before-*.json"))
        for key in ("model", "evaluation") if measured else ("model",):
            if begun[key] != resolved[key]:
                raise RecipeError(
                    f"{self.paths.root} was begun with {key} {begun[key]}, not {resolved[key]}: "
                    "choose another name=, or start over with --fresh"
                )
        if begun != resolved:
            for result in (
                self.paths.summary,
                *(self.paths.evaluation("after", e.name) for e in self.recipe.evaluation),
            ):
                result.unlink(missing_ok=True)
        write_whole(self.paths.recipe, yaml.safe_dump(resolved, sort_keys=False))

    def note(self, event: str, **details: object) -> None:
        """Adds a line to the run's journal."""
        with self.paths.journal.open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **details}) + "\n")

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.note("stage", stage=stage)


@contextmanager
def locked(name: str, paths: RunPaths) -> Iterator[None]:
    """One supervisor at a time for a run; `AlreadyRunning` names the other."""
    paths.root.mkdir(parents=True, exist_ok=True)
    with (paths.root / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise AlreadyRunning(
                f"run {name!r} is already running (process {file.read() or 'unknown'}): "
                "wait for it, stop it, or start another with name=..."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
