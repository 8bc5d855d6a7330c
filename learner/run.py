"""What the stages of one learner process share: its models, where it is, and its dealings with the world.

Invariant: a trajectory counts as trained only when a durable checkpoint holds its gradient (`commit` follows `save`);
whatever kills the process before that, the next one starts from the checkpoint, puts later claims back and trains them
again. Weights go out under a version that was never used before, also after a step back.

It waits for two others, never for ever: for actors to bring a batch (`claim_seconds`), and for engines to serve what
was published (`publish_seconds`, after which it goes on without them).
"""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from ..buffer import (
    BufferError,
    BufferSettings,
    Lineage,
    ReplayBuffer,
    Trajectory,
    Unreadable,
    WeightLedger,
    write_archive,
)
from . import checkpoint, metrics, ranks
from .model import Critic, Policy
from .optimization import Trainee, Update
from .publish import newest_written, publish
from .settings import LearnerSettings

log = logging.getLogger(__name__)

Stage = Literal["supervised", "value", "policy", "done"]
REFUSALS = 3  # updates in a row that were not finite: weights or data are broken, and going on mends neither
CLAIM_SLICE = 1.0  # seconds between two looks at the clock and at SIGTERM while waiting for a batch


class NonFinite(RuntimeError):
    """Several updates in a row had a loss or gradient that is not finite."""


class LearnerConfig(BaseModel):
    """The file a learner process is started with."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run_dir: Path
    """Where checkpoints, weights, metrics and samples go."""
    model: Path
    """The Hugging Face directory to start from."""
    buffer: BufferSettings
    learner: LearnerSettings


@dataclass
class Progress:
    """Where the run is; saved with every checkpoint, as JSON."""

    stage: Stage = "supervised"
    step: int = 0
    """Steps done in this stage."""
    total: int = 0
    """Steps done in all stages."""
    saved: int = 0
    """Checkpoints written: the number of the newest."""
    claimed: int = 0
    """Batches claimed from the buffer and trained on."""
    committed: int = 0
    """Those of them whose gradient is in a durable checkpoint."""
    version: int = 0
    """The newest weights that were published."""
    lineage: Lineage = field(default_factory=Lineage)
    """Which versions repeat an older one's weights, as far as it matters for what is claimed."""
    manifests: dict[int, list[str]] = field(default_factory=dict)
    """The attempts of each batch claimed since the checkpoint before last."""
    rewards: list[float] = field(default_factory=list)
    """Of the newest trained trajectories, up to `stop.window`."""
    skipped: int = 0
    """Policy steps that changed no weight: no signal, everything masked, or refused."""
    refused: int = 0
    """Updates that were not finite."""
    zero_variance: int = 0
    """Policy batches whose episodes all earned the same."""

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> "Progress":
        manifests = {int(step): ids for step, ids in saved["manifests"].items()}
        return cls(**{**saved, "manifests": manifests, "lineage": Lineage.of(saved["lineage"]["repeats"])})

    def ids(self, committed: bool) -> dict[int, list[str]]:
        """The remembered batches that are (not) in a durable checkpoint."""
        return {step: ids for step, ids in self.manifests.items() if (step <= self.committed) == committed}


@dataclass(frozen=True)
class Claim:
    """A batch taken from the buffer: this rank's share of it."""

    step: int
    trajectories: Sequence[Trajectory]
    version: int
    """The newest weights when it was taken."""
    lineage: Lineage
    wait_seconds: float

    def age(self, sampled: int) -> int:
        """How many versions the newest weights are ahead of those that sampled a token."""
        return self.lineage.age(sampled, self.version)


class Run:
    """The learner's side of one run. Made on every rank, at the newest checkpoint if there is one."""

    def __init__(self, config: LearnerConfig):
        self.config, self.settings = config, config.learner
        ranks.start(self.settings.parallel, self.settings.seed)
        self._stop = threading.Event()
        config.run_dir.mkdir(parents=True, exist_ok=True)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.settings.dtype]
        self.policy = Trainee(Policy(config.model, dtype), self.settings.policy)
        judged = self.settings.uses_critic
        self.critic = Trainee(Critic(config.model, dtype), self.settings.critic) if judged else None
        self.progress = Progress()
        self.weights = WeightLedger(config.buffer)
        self.buffer = ReplayBuffer(config.buffer, on_restart=self._reconcile)
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        self._refused_in_a_row = 0
        self._resume()
        self._recorded = time.monotonic()

    def stopping(self) -> bool:
        """Whether the process was asked to stop (SIGTERM to the first rank); the same on every rank."""
        return ranks.agree(self._stop.is_set())

    def enter(self, stage: Stage) -> None:
        """Goes on to `stage`, durably. After the supervised stage rollouts begin: it publishes the first weights.

        The critic starts from them, and what an engine sampled before, untrained, is made too old to be claimed.
        """
        if self.progress.stage == "supervised":
            self._begin_critic()
            self.publish(at_least=self.config.buffer.eta if self.settings.supervised else 0)
        self.progress.stage = stage
        if stage != "done":  # from there the policy stage may go on
            self.progress.step = 0
        self.checkpoint()
        self._recorded = time.monotonic()

    def claim(self) -> Claim | None:
        """Waits for the next batch; None if asked to stop meanwhile. Raises TimeoutError after `claim_seconds`.

        What turns out to be unreadable is withdrawn, on whatever rank, and the step is claimed again.
        """
        begun, step = time.monotonic(), self.progress.claimed + 1
        while (ids := self._wait_for_batch(step, begun)) is not None:
            self.progress.manifests[step] = ids
            trajectories, reasons = self._read(ranks.shard(ids))
            unreadable = dict(ranks.gather(reasons))
            if not unreadable:
                progress, waited = self.progress, time.monotonic() - begun
                return Claim(step, trajectories, progress.version, progress.lineage, waited)
            del self.progress.manifests[step]
            if ranks.is_first():
                self.buffer.withdraw(step, unreadable)
        return None

    def _wait_for_batch(self, step: int, begun: float) -> list[str] | None:
        while True:
            ids = self.buffer.claim(step) if ranks.is_first() and not self._stop.is_set() else None
            pressed = ranks.is_first() and ids is None and self.buffer.pressed()
            ids, stop, pressed = ranks.agree((ids, self._stop.is_set(), pressed))
            if stop:
                if ids is not None and ranks.is_first():
                    self.buffer.withdraw(step, {})  # nobody has read it
                return None
            if ids is not None:
                return ids
            if pressed and self.progress.claimed > self.progress.committed:
                log.warning("Redis is nearly full: checkpointing now, to free what is trained")
                self.checkpoint()
            elif pressed:
                self._archive()
            if (waited := time.monotonic() - begun) > self.settings.claim_seconds:
                raise TimeoutError(
                    f"no batch of {self.config.buffer.batch_size} groups became ready in {waited:.0f} s: "
                    f"are the actors running? The buffer says {self.buffer.stats()}"
                )
            if ranks.is_first():
                self.buffer.wait(CLAIM_SLICE)

    def _read(self, ids: list[str]) -> tuple[list[Trajectory], list[tuple[str, str]]]:
        try:
            return self.buffer.get(ids), []
        except Unreadable as error:
            return [], list(error.reasons.items())

    def finish(self, claim: Claim) -> None:
        """The batch is trained on; the next `publish` gives its places in the buffer to new attempts."""
        progress = self.progress
        progress.claimed = claim.step
        rewards = ranks.gather([trajectory.reward for trajectory in claim.trajectories])
        progress.rewards = (progress.rewards + rewards)[-self.settings.stop.window :]

    def publish(self, changed: bool = True, at_least: int = 0) -> float:
        """Tells the buffer what is trained, after sending out the weights if they changed; returns the seconds it took.

        They go out under a new version above `at_least`.
        """
        progress = self.progress
        seconds = self._send_weights(at_least) if changed else 0.0
        progress.lineage = progress.lineage.within(self.config.buffer.eta, progress.version)
        if ranks.is_first():
            self.buffer.publish(progress.version, progress.claimed, progress.lineage)
        return seconds

    def publish_again(self) -> None:
        """Sends out the checkpoint's weights: what they sampled before is no older under their new version."""
        before = self.progress.version
        self._send_weights()
        self.progress.lineage = self.progress.lineage.repeat(self.progress.version, before)
        self.publish(changed=False)

    def guard(self, *updates: Update, batch: Sequence[Trajectory] = ()) -> None:
        """Counts updates that were refused, keeps their batch aside, and raises NonFinite after several in a row."""
        refused = [update for update in updates if not update.finite]
        if not refused:
            self._refused_in_a_row = 0
            return
        self.progress.refused += len(refused)
        self._refused_in_a_row += 1
        worst = refused[0]
        message = f"loss {worst.loss}, gradient norm {worst.grad_norm} at step {self.progress.total + 1}"
        if batch:
            name = f"batch-{self.progress.claimed + 1:06d}.rank{ranks.number()}.archive"
            kept = self.config.run_dir / "refused" / name
            kept.parent.mkdir(exist_ok=True)
            write_archive(kept, batch)
            message += f" ({kept})"
        log.error("update refused: %s", message)
        if self._refused_in_a_row >= REFUSALS:
            raise NonFinite(f"{REFUSALS} steps in a row were refused, the last one with {message}")

    def record(self, **values: Any) -> None:
        """Ends a step with a line in the metrics.

        Its seconds count from the line before, or the stage's begin, so they add up: a checkpoint is in the step after.
        """
        progress, before, self._recorded = self.progress, self._recorded, time.monotonic()
        progress.step += 1
        progress.total += 1
        record = {
            "stage": progress.stage,
            "step": progress.step,
            "seconds": self._recorded - before,
            **values,
            "skipped": progress.skipped,
            "refused": progress.refused,
            "zero_variance": progress.zero_variance,
        }
        metrics.append(self.config.run_dir, {**record, "alarms": metrics.alarms(record)})
        if progress.total % self.settings.checkpoint_every == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Makes everything so far durable and tells the buffer."""
        progress = self.progress
        known = {step: ids for step, ids in progress.manifests.items() if step > progress.committed}
        progress.saved += 1
        saved = Progress(**{**vars(progress), "committed": progress.claimed})
        checkpoint.save(self.config.run_dir, progress.saved, self._trainees(), asdict(saved))
        if ranks.is_first():
            self.buffer.commit(progress.claimed)
            self._archive()
        progress.committed, progress.manifests = progress.claimed, known

    def _leave(self) -> None:
        """Asked to stop. The step may take longer than whoever asked will wait."""
        self._stop.set()
        if ranks.is_first():
            threading.Thread(target=self._say_so, daemon=True).start()  # a signal may come within a call to Redis

    def _say_so(self) -> None:
        try:
            self.buffer.leave()
        except BufferError as error:
            log.warning("Redis was not told that the learner leaves: %s", error)

    def _archive(self) -> None:
        if self.config.buffer.archive and ranks.is_first():
            self.buffer.archive(self.config.run_dir / "archive")

    def _send_weights(self, at_least: int = 0) -> float:
        progress = self.progress
        # Neither the checkpoint nor a Redis that lost power may know the newest; the folder does.
        at_least = max(at_least, progress.version, newest_written(self.config.run_dir))
        issued = self.buffer.next_version(at_least) if ranks.is_first() else 0
        progress.version = ranks.agree(issued)
        done = publish(
            self.policy.model, self.config.model, self.config.run_dir, self.weights, progress.version, progress.total,
            self.settings.publish_seconds, self._stop,
        )  # fmt: skip
        if done.behind:
            log.warning(
                "version %d is not served after %.0f s by %s: going on without them",
                progress.version, done.seconds, ", ".join(done.behind),
            )  # fmt: skip
        return done.seconds

    def _trainees(self) -> dict[str, Trainee]:
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})

    def _begin_critic(self) -> None:
        """With the policy's weights, but for its head."""
        if self.critic:
            state = self.policy.model.state_dict()
            trunk = {name: tensor for name, tensor in state.items() if not name.startswith("output_layer")}
            self.critic.model.load_state_dict(trunk, strict=False)
            self.critic.optimizer.reload_model_params()

    def _resume(self) -> None:
        folder = checkpoint.newest(self.config.run_dir)
        if folder is not None:
            saved = {name: trainee for name, trainee in self._trainees().items() if (folder / name).exists()}
            self.progress = Progress.restore(checkpoint.load(folder, saved))
            if "critic" not in saved:  # none was needed so far
                self._begin_critic()
            log.info("resumed from %s: %s step %d", folder, self.progress.stage, self.progress.step)
        if ranks.is_first():
            progress = self.progress
            self.buffer.rewind(progress.claimed, progress.manifests, progress.version, progress.lineage)
        if self.progress.stage in ("value", "policy"):
            self.publish_again()

    def _reconcile(self) -> None:
        progress = self.progress
        lineage = progress.lineage
        self.buffer.reconcile(progress.ids(committed=False), progress.ids(committed=True), progress.version, lineage)
